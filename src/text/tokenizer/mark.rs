//! Marks in a text, made of a character that the text does not have.

use std::collections::HashSet;

/// A private-use character that none of `texts` has. `None` when they have all of them.
pub(crate) fn unused_character<'t>(texts: impl IntoIterator<Item = &'t str>) -> Option<char> {
    let planes = '\u{F0000}'..='\u{10FFFD}';
    let used: HashSet<char> = texts.into_iter().flat_map(str::chars).filter(|c| planes.contains(c)).collect();
    planes.into_iter().find(|c| !used.contains(c))
}

/// `text` with `mark` at these byte offsets, which ascend.
pub(crate) fn inserted(text: &str, offsets: &[usize], mark: char) -> String {
    let mut out = String::with_capacity(text.len() + offsets.len() * mark.len_utf8());
    let mut from = 0;
    for &offset in offsets {
        out.push_str(&text[from..offset]);
        out.push(mark);
        from = offset;
    }
    out + &text[from..]
}

/// `text` without `mark`, and the byte offsets of the marks.
pub(crate) fn removed(text: &str, mark: char) -> (String, Vec<usize>) {
    let mut out = String::with_capacity(text.len());
    let mut offsets = Vec::new();
    for part in text.split(mark) {
        out.push_str(part);
        offsets.push(out.len());
    }
    offsets.pop();
    (out, offsets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_character_is_unused_until_there_is_none() {
        assert_eq!(unused_character(["a\u{F0000}", "\u{F0001}"]), Some('\u{F0002}'));
        let all: String = ('\u{F0000}'..='\u{10FFFD}').collect();
        assert_eq!(unused_character([all.as_str()]), None);
    }

    proptest! {
        #[test]
        fn marks_come_out_where_they_went_in(text in "[a<é]{0,20}", places in proptest::collection::vec(0usize..30,
            0..6)) {
            let mut offsets: Vec<usize> = places.into_iter().filter(|&at| text.is_char_boundary(at)).collect();
            offsets.sort_unstable();
            prop_assert_eq!(removed(&inserted(&text, &offsets, '\u{F0000}'), '\u{F0000}'), (text, offsets));
        }
    }
}

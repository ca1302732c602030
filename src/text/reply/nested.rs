//! Objects and lists as tags within tags, made JSON: `<KEY>VALUE</KEY>`, and `<item>VALUE</item>` in a list.

use serde_json::{Map, Value};

/// Levels of tags; deeper ones are text.
const MAX_DEPTH: usize = 32;

/// The JSON of `text`, whose tags begin with `tag`, the angle bracket included.
pub(super) fn to_json(text: &str, tag: &str) -> String {
    read(text, tag, MAX_DEPTH).to_string()
}

fn read(text: &str, tag: &str, depth: usize) -> Value {
    let children = if depth > 0 { children(text, tag) } else { None };
    match children {
        Some(children) if children.iter().all(|(key, _)| *key == "item") => {
            children.into_iter().map(|(_, value)| read(value, tag, depth - 1)).collect()
        }
        Some(children) => {
            let fields = children.into_iter().map(|(key, value)| (key.to_string(), read(value, tag, depth - 1)));
            Value::Object(Map::from_iter(fields))
        }
        None => serde_json::from_str(text.trim()).unwrap_or_else(|_| text.into()),
    }
}

/// The tags that `text` consists of, with what is in them; `None` where it has none or other text too.
fn children<'t>(text: &'t str, tag: &str) -> Option<Vec<(&'t str, &'t str)>> {
    let (mut rest, mut found) = (text.trim(), Vec::new());
    while !rest.is_empty() {
        let (key, inner) = rest.strip_prefix(tag)?.split_once('>')?;
        let length = closing(inner, tag, key)?;
        found.push((key, &inner[..length]));
        rest = inner[length + tag.len() + key.len() + 2..].trim_start();
    }
    Some(found).filter(|found| !found.is_empty())
}

/// Where the tag that closes `key` begins, past others of this key.
fn closing(text: &str, tag: &str, key: &str) -> Option<usize> {
    let (mut open, mut at) = (1, 0);
    loop {
        let found = at + text[at..].find(tag)?;
        let name = &text[found + tag.len()..];
        let closes =
            name.strip_prefix('/').and_then(|name| name.strip_prefix(key)).is_some_and(|after| after.starts_with('>'));
        let opens = name.strip_prefix(key).is_some_and(|after| after.starts_with('>'));
        open = if closes { open - 1 } else { open + usize::from(opens) };
        if open == 0 {
            return Some(found);
        }
        at = found + tag.len();
    }
}

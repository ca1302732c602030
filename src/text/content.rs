//! Separates the text of a conversation from the text of its chat template, so that only the template can write special
//! tokens such as a turn's marker.
//!
//! ```text
//! messages, tools ───────────────────────────────────────▶ template ─▶ text
//!        └─ each `<`, `|`, `>` followed by a mark, a ────▶ template ─▶ the same text with marks, or another one
//!           private-use character                                      (the template looks at marked text: mark less)
//! ```
//! A token such as `<|im_start|>` in the text is the template's if it contains no mark. One that a user wrote, or made
//! the template assemble from parts, is encoded as plain text. Markers of reasoning and calls keep their meaning in
//! messages of the assistant, since templates parse them again.

use std::sync::Once;

use aho_corasick::AhoCorasick;
use serde_json::Value;

use crate::text::chat_template::{ChatTemplate, RenderOptions};
use crate::text::tokenizer::{Tokenizer, inserted, removed, unused_character};
use crate::{Error, Result};

/// The text of a prompt, with the places that the conversation wrote.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptText {
    text: String,
    content: Vec<usize>, // where a character ends that the conversation wrote and a marker may have
}

impl PromptText {
    /// The whole text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Appends text that counts as the template's.
    pub fn push(&mut self, text: &str) {
        self.text += text;
    }
}

/// A text that is wholly the template's.
impl From<String> for PromptText {
    fn from(text: String) -> Self {
        Self { text, content: Vec::new() }
    }
}

/// Maximum renderings to compare, for templates with a clock.
const MAX_TRIES: usize = 2;

/// The markers that structure a prompt.
pub struct Markers {
    all: Vec<Marker>,
    search: AhoCorasick, // for their texts
    signs: Vec<char>,    // of which tokens are made, beside words
    warned: Once,        // that a conversation could not be separated
}

struct Marker {
    text: String,
    is_token: bool, // else only a word that the template has
    spared: bool,   // templates look for it: of a thought or a call, which assistants write, or no token
}

/// What to mark.
#[derive(Clone, Copy, PartialEq)]
enum Marking {
    /// Every sign, wherever it stands.
    Signs,
    /// Signs, except within markers that templates look for.
    Sparing,
    /// Only the beginning of other markers.
    Whole,
}

impl Markers {
    /// The special tokens, and the added tokens that the template writes. Errors: `Error::Model` when they are too
    /// many.
    pub fn of(tokenizer: &Tokenizer, template: &str) -> Result<Self> {
        let gives_form = |(text, special): &(String, bool)| {
            !text.trim().is_empty() && (*special || text.chars().count() > 1 && template.contains(text.as_str()))
        };
        let of_reply = |text: &str| ["think", "tool", "arg_"].iter().any(|word| text.contains(word));
        let tokens = tokenizer.added_tokens().into_iter().filter(gives_form).map(|(text, _)| text);
        let mut all: Vec<Marker> =
            tokens.map(|text| Marker { spared: of_reply(&text), text, is_token: true }).collect();
        // Slashes are in every path, and tokens have them only behind another sign.
        let is_sign = |c: &char| !c.is_alphanumeric() && !c.is_whitespace() && !['_', '/'].contains(c);
        let mut signs: Vec<char> = all.iter().flat_map(|marker| marker.text.chars()).filter(is_sign).collect();
        signs.sort_unstable();
        signs.dedup();
        for word in tags(template) {
            if !all.iter().any(|marker| marker.text == word) {
                all.push(Marker { text: word.into(), is_token: false, spared: true });
            }
        }
        let search = AhoCorasick::new(all.iter().map(|marker| &marker.text))
            .map_err(|e| Error::Model(format!("the model's tokenizer has too many special tokens: {e}")))?;
        Ok(Self { all, search, signs, warned: Once::new() })
    }

    /// Renders a conversation with `template`.
    ///
    /// Errors: as [`ChatTemplate::render`], or when the conversation uses every character for private use.
    pub fn render(&self, template: &ChatTemplate, messages: &[Value], options: &RenderOptions) -> Result<PromptText> {
        let mut text = template.render(messages, options)?;
        let kwargs = Value::Object(options.kwargs.clone());
        let all = || options.tools.iter().chain([&kwargs]).chain(messages);
        if !all().any(|value| self.touches(value)) {
            return Ok(text.into());
        }
        for _ in 0..MAX_TRIES {
            if let Some(content) = self.written(template, messages, options, &text)? {
                return Ok(PromptText { text, content });
            }
            // A clock in the template may have moved on between two renderings.
            let later = template.render(messages, options)?;
            if later == text {
                break;
            }
            text = later;
        }
        self.warned.call_once(|| {
            tracing::warn!(
                "the model's chat template looks into messages: special tokens spelled out in messages count as the \
                 template's own"
            );
        });
        Ok(text.into())
    }

    /// Where the conversation wrote signs into `text`. `None`: the template treats marked text differently.
    fn written(
        &self,
        template: &ChatTemplate,
        messages: &[Value],
        options: &RenderOptions,
        text: &str,
    ) -> Result<Option<Vec<usize>>> {
        let kwargs = Value::Object(options.kwargs.clone());
        let strings: Vec<String> =
            options.tools.iter().chain([&kwargs]).chain(messages).map(Value::to_string).collect();
        let mark =
            unused_character(strings.iter().map(String::as_str).chain([text, template.source()])).ok_or_else(|| {
                Error::Invalid("this conversation contains every private-use character: leave one out".into())
            })?;
        for marking in [Marking::Signs, Marking::Sparing, Marking::Whole] {
            let kwargs =
                options.kwargs.iter().map(|(name, value)| (name.clone(), self.marked(value, marking, mark))).collect();
            let tools = options.tools.as_ref().map(|tools| self.marked(tools, marking, mark));
            let messages: Vec<Value> =
                messages.iter().map(|message| self.marked_message(message, marking, mark)).collect();
            let marked = match template.render(&messages, &RenderOptions { tools, kwargs, ..options.clone() }) {
                Ok(marked) => marked,
                // The template refuses marked text, or it is too long. With the fewest marks this is an error:
                // otherwise a lack of time or memory would make the text count as the template's own.
                Err(Error::Invalid(_)) if marking != Marking::Whole => continue,
                Err(e) => return Err(e),
            };
            let (unmarked, content) = removed(&marked, mark);
            if unmarked == text {
                return Ok(Some(content));
            }
        }
        Ok(None)
    }

    /// Appends the beginning of the assistant's answer.
    pub fn push_answer(&self, prompt: &mut PromptText, text: &str) {
        let at = prompt.text.len();
        prompt.content.extend(self.places(text, Marking::Sparing).into_iter().map(|place| at + place));
        prompt.text += text;
    }

    /// Token ids of `prompt`, in which markers that the conversation wrote are plain text.
    pub fn encode(&self, tokenizer: &Tokenizer, prompt: &PromptText) -> Result<Vec<u32>> {
        tokenizer.encode_cut(&prompt.text, &self.cuts(prompt))
    }

    /// Where to cut markers that the conversation wrote, even in part.
    fn cuts(&self, prompt: &PromptText) -> Vec<usize> {
        let PromptText { text, content } = prompt;
        if content.is_empty() {
            return Vec::new();
        }
        let written = |start: usize, end: usize| {
            content[content.partition_point(|&place| place <= start)..].first().is_some_and(|&place| place <= end)
        };
        let tokens =
            self.search.find_overlapping_iter(text).filter(|found| self.all[found.pattern().as_usize()].is_token);
        let found = tokens.filter(|found| written(found.start(), found.end()));
        let mut cuts: Vec<usize> = found.map(|found| after_first(text, found.start())).collect();
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }

    /// Whether any string contains something to mark.
    fn touches(&self, value: &Value) -> bool {
        let marks = |text: &str| text.contains(&self.signs[..]) || self.search.is_match(text);
        match value {
            Value::String(text) => marks(text),
            Value::Array(list) => list.iter().any(|value| self.touches(value)),
            Value::Object(map) => map.iter().any(|(key, value)| marks(key) || self.touches(value)),
            _ => false,
        }
    }

    fn marked_message(&self, message: &Value, marking: Marking, mark: char) -> Value {
        match marking {
            Marking::Signs if message["role"] == "assistant" => self.marked(message, Marking::Sparing, mark),
            _ => self.marked(message, marking, mark),
        }
    }

    fn marked(&self, value: &Value, marking: Marking, mark: char) -> Value {
        let string = |text: &str| inserted(text, &self.places(text, marking), mark);
        match value {
            Value::String(text) => string(text).into(),
            Value::Array(list) => list.iter().map(|value| self.marked(value, marking, mark)).collect(),
            Value::Object(map) => {
                map.iter().map(|(key, value)| (string(key), self.marked(value, marking, mark))).collect()
            }
            other => other.clone(),
        }
    }

    /// The byte offsets where marks go: behind characters.
    fn places(&self, text: &str, marking: Marking) -> Vec<usize> {
        let mut marked = vec![false; text.len()]; // by the byte at which a character begins
        if marking != Marking::Whole {
            text.match_indices(&self.signs[..]).for_each(|(at, _)| marked[at] = true);
        }
        let spared =
            |found: &aho_corasick::Match| marking != Marking::Signs && self.all[found.pattern().as_usize()].spared;
        self.search.find_overlapping_iter(text).filter(spared).for_each(|found| marked[found.range()].fill(false));
        self.search
            .find_overlapping_iter(text)
            .filter(|found| !spared(found))
            .for_each(|found| marked[found.start()] = true);
        let places = marked.into_iter().enumerate().filter(|(_, marked)| *marked);
        places.map(|(at, _)| after_first(text, at)).collect()
    }
}

/// Tags such as `<image>` in a template.
fn tags(template: &str) -> impl Iterator<Item = &str> {
    let ends = |rest: &str| rest.find(|c: char| c == '>' || c.is_whitespace() || ['\'', '"'].contains(&c));
    template.match_indices('<').filter_map(move |(at, _)| {
        let end = at + ends(&template[at..])?;
        template[end..].starts_with('>').then(|| &template[at..=end])
    })
}

/// Where the character at `start` ends.
fn after_first(text: &str, start: usize) -> usize {
    start + text[start..].chars().next().map_or(0, char::len_utf8)
}

//! Grammars for llguidance: one Lark grammar, and the schemas and grammars that it refers to by name.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::regex_to_lark;
use serde_json::json;

use super::Grammar;
use super::schema::{self, MAX_BYTES};
use crate::{Error, Result};

/// A vocabulary's special tokens by their text, longest first.
pub(super) struct Specials(Vec<(String, u32)>);

impl Specials {
    pub(super) fn new<'a>(tokens: impl Iterator<Item = (&'a [u8], u32)>) -> Self {
        let mut tokens: Vec<_> =
            tokens.filter_map(|(bytes, id)| Some((String::from_utf8(bytes.to_vec()).ok()?, id))).collect();
        tokens.retain(|(text, _)| !text.is_empty());
        tokens.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        Self(tokens)
    }

    fn at(&self, text: &str) -> Option<(usize, u32)> {
        self.0.iter().find(|(token, _)| text.starts_with(token)).map(|(token, id)| (token.len(), *id))
    }

    /// Where the first of them stands in `text`.
    fn first(&self, text: &str) -> Option<usize> {
        text.char_indices().map(|(at, _)| at).find(|&at| self.at(&text[at..]).is_some())
    }
}

/// The input of llguidance.
pub(super) fn source(grammar: &Grammar, specials: &Specials) -> Result<TopLevelGrammar> {
    let mut writer = Writer { specials, rules: String::new(), parts: Vec::new(), names: 0 };
    // A single schema or grammar is its own source, so that errors name its lines.
    let root = match grammar {
        Grammar::Json | Grammar::JsonSchema(_) | Grammar::LooseSchema(_) | Grammar::Lark(_) => {
            writer.expression(grammar)?;
            return Ok(TopLevelGrammar { grammars: writer.parts, max_tokens: None });
        }
        _ => writer.expression(grammar)?,
    };
    let text = format!("start: {root}\n{}", writer.rules);
    if text.len() > 2 * MAX_BYTES {
        return Err(too_long("the output format"));
    }
    let mut grammars = vec![GrammarWithLexer { name: None, ..GrammarWithLexer::from_lark(text) }];
    grammars.append(&mut writer.parts);
    Ok(TopLevelGrammar { grammars, max_tokens: None })
}

fn too_long(what: &str) -> Error {
    Error::Invalid(format!("{what} is too long: the limit is {} KiB", MAX_BYTES >> 10))
}

struct Writer<'a> {
    specials: &'a Specials,
    rules: String,
    parts: Vec<GrammarWithLexer>,
    names: usize,
}

impl Writer<'_> {
    /// `grammar` as an expression of Lark. Parts that need a name become rules or grammars of their own.
    fn expression(&mut self, grammar: &Grammar) -> Result<String> {
        Ok(match grammar {
            Grammar::Json => self.schema(&json!({"type": "object"}), false)?,
            Grammar::JsonSchema(schema) => self.schema(schema, false)?,
            Grammar::LooseSchema(schema) => self.schema(schema, true)?,
            Grammar::Regex(regex) if regex.len() > MAX_BYTES => return Err(too_long("the regular expression")),
            Grammar::Regex(regex) => format!("/{}/", regex_to_lark(whole(regex), "")),
            Grammar::Lark(text) if text.len() > MAX_BYTES => return Err(too_long("the grammar")),
            Grammar::Lark(text) => self.part(GrammarWithLexer::from_lark(text.clone())),
            Grammar::Choice(texts) if texts.is_empty() => {
                return Err(Error::Invalid("a choice needs at least one text".into()));
            }
            Grammar::Choice(texts) if texts.iter().map(|text| text.len() + 60).sum::<usize>() > MAX_BYTES => {
                return Err(too_long("the choice"));
            }
            Grammar::Choice(texts) => {
                format!("({})", texts.iter().map(|text| quoted(text)).collect::<Vec<_>>().join(" | "))
            }
            Grammar::Literal(text) => self.literal(text),
            Grammar::Until(text) => match self.specials.first(text) {
                Some(0) => format!("/(?s:.*)/ {}", self.literal(text)),
                // What stands before the special token may stand elsewhere too.
                Some(at) => {
                    let before = self.rule("[lazy]", format!("/(?s:.*)/ {}", quoted(&text[..at])));
                    format!("({before})+ {}", self.literal(&text[at..]))
                }
                None => self.rule("[lazy]", format!("/(?s:.*)/ {}", quoted(text))),
            },
            Grammar::Without(text) => match self.specials.first(text) {
                Some(_) => "/(?s:.*)/".into(),
                None => self.rule("", format!("/(?s:.*)/ & ~(/(?s:.*)/ {} /(?s:.*)/)", quoted(text))),
            },
            Grammar::Sequence(items) => self.join(items, " ")?,
            Grammar::Either(items) => self.join(items, " | ")?,
            Grammar::Repeated(item) => format!("({})*", self.expression(item)?),
        })
    }

    fn join(&mut self, items: &[Grammar], between: &str) -> Result<String> {
        if items.is_empty() {
            return Ok("\"\"".into());
        }
        let items = items.iter().map(|item| self.expression(item)).collect::<Result<Vec<_>>>()?;
        Ok(format!("({})", items.join(between)))
    }

    /// Text as strings, special tokens as token ids.
    fn literal(&self, text: &str) -> String {
        let mut items = Vec::new();
        let (mut plain, mut at) = (0, 0);
        while at < text.len() {
            let step = text[at..].chars().next().map_or(1, char::len_utf8);
            let Some((length, id)) = self.specials.at(&text[at..]) else {
                at += step;
                continue;
            };
            items.extend((plain < at).then(|| quoted(&text[plain..at])));
            items.push(format!("<[{id}]>"));
            at += length;
            plain = at;
        }
        items.extend((plain < at || items.is_empty()).then(|| quoted(&text[plain..])));
        items.join(" ")
    }

    fn schema(&mut self, schema: &serde_json::Value, loose: bool) -> Result<String> {
        Ok(self.part(GrammarWithLexer::from_json_schema(schema::prepared(schema, loose)?)))
    }

    fn part(&mut self, part: GrammarWithLexer) -> String {
        self.names += 1;
        let name = format!("part{}", self.names);
        self.parts.push(GrammarWithLexer { name: Some(name.clone()), ..part });
        format!("@{name}")
    }

    fn rule(&mut self, attributes: &str, body: String) -> String {
        self.names += 1;
        // Only rules, in lower case, have attributes; only terminals, in upper case, know `~`.
        let name = format!("{}{}", if attributes.is_empty() { "TEXT" } else { "text" }, self.names);
        self.rules += &format!("{name}{attributes}: {body}\n");
        name
    }
}

/// A Lark string is a JSON string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A pattern for whole texts, without its outer anchors, which the grammar engine does not know.
fn whole(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(rest) if rest.chars().rev().take_while(|&c| c == '\\').count() % 2 == 0 => rest,
        _ => regex,
    }
}

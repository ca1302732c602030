//! Constraints of an answer's text: JSON, a JSON schema, a regular expression, a grammar, and the syntax of a reply
//! around them.
//!
//! A [`Grammar`] is compiled against a model's vocabulary to a [`Constraint`], which masks the tokens that may not come
//! next.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::Value;

use crate::engine::sampler::Constraint;
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Result};

mod lark;
mod schema;

/// What a whole answer must match.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// Any JSON object.
    Json,
    /// JSON that this schema validates. A schema with a part that cannot be enforced is refused.
    JsonSchema(Value),
    /// JSON that follows this schema as far as it can be enforced.
    LooseSchema(Value),
    /// Text that this regular expression, in the syntax of the crate `regex`, matches whole.
    Regex(String),
    /// Text that a grammar in llguidance's variant of Lark derives.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// This text. Special tokens of the model in it come as those tokens.
    Literal(String),
    /// Any text up to and including the first occurrence of this one.
    Until(String),
    /// Any text in which this one does not occur.
    Without(String),
    /// All of them, one after another.
    Sequence(Vec<Grammar>),
    /// One of them.
    Either(Vec<Grammar>),
    /// The grammar, any number of times.
    Repeated(Box<Grammar>),
}

impl Grammar {
    /// Only this text.
    pub fn literal(text: &str) -> Self {
        Self::Literal(text.into())
    }

    /// All of `items`, one after another.
    pub fn sequence<const N: usize>(items: [Grammar; N]) -> Self {
        Self::Sequence(items.into())
    }

    /// Whether a part of it is a loose schema.
    fn is_loose(&self) -> bool {
        match self {
            Self::LooseSchema(_) => true,
            Self::Sequence(items) | Self::Either(items) => items.iter().any(Self::is_loose),
            Self::Repeated(item) => item.is_loose(),
            _ => false,
        }
    }

    /// The grammar with only the types of loose schemas.
    fn loosened(&self) -> Self {
        match self {
            Self::LooseSchema(schema) => Self::LooseSchema(schema::type_only(schema)),
            Self::Sequence(items) => Self::Sequence(items.iter().map(Self::loosened).collect()),
            Self::Either(items) => Self::Either(items.iter().map(Self::loosened).collect()),
            Self::Repeated(item) => Self::Repeated(Box::new(item.loosened())),
            other => other.clone(),
        }
    }

    /// The grammar, or nothing.
    pub fn optional(self) -> Self {
        Self::Either(vec![self, Self::Sequence(Vec::new())])
    }
}

/// Compiles grammars for the vocabulary of one model. Made once per model.
pub struct Grammars {
    factory: ParserFactory,
    specials: lark::Specials,
    eos: Vec<u32>,
    vocab_size: usize,
}

impl Grammars {
    /// Sorts the vocabulary. Errors: `Error::Model` when the vocabulary cannot be used.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self> {
        let vocab_size = tokenizer.vocab_size();
        let mut eos: Vec<u32> = tokenizer.eos_ids().iter().copied().filter(|&id| (id as usize) < vocab_size).collect();
        let special: Vec<u32> = tokenizer.special_ids().into_iter().filter(|&id| (id as usize) < vocab_size).collect();
        // With a byte in front that UTF-8 never has, a token is never part of a text: only its id names it.
        let hidden = |bytes: &[u8]| [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat();
        let word = |id: u32| match tokenizer.token_bytes(id) {
            [] => Vec::new(),
            bytes if special.binary_search(&id).is_ok() || eos.contains(&id) => hidden(bytes),
            bytes => bytes.to_vec(),
        };
        let mut words: Vec<Vec<u8>> = (0..vocab_size as u32).map(word).collect();
        if eos.is_empty() {
            // A model without an end token gets one here, outside the logits.
            eos.push(vocab_size as u32);
            words.push(hidden(b"<end>"));
        }
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, eos[0]), &words).with_eos_tokens(&eos);
        // It claims no canonical tokenization: every way to cut the text is allowed, and the model chooses its own.
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|e| {
            Error::Model(format!("constrained output cannot use the model's vocabulary: {}", one_line(&e)))
        })?;
        factory.quiet();
        *factory.limits_mut() = schema::limits();
        let specials = lark::Specials::new(special.iter().map(|&id| (tokenizer.token_bytes(id), id)));
        Ok(Self { factory, specials, eos, vocab_size })
    }

    /// The constraint of one answer.
    ///
    /// Errors: `Error::Invalid` names what is wrong, not supported or too large in the grammar.
    pub fn compile(&self, grammar: &Grammar) -> Result<Box<dyn Constraint>> {
        let matcher = match self.matcher(grammar) {
            Err(_) if grammar.is_loose() => self.matcher(&grammar.loosened())?,
            matcher => matcher?,
        };
        Ok(Box::new(Matching { matcher, eos: self.eos.clone(), vocab_size: self.vocab_size }))
    }

    fn matcher(&self, grammar: &Grammar) -> Result<Matcher> {
        let source = lark::source(grammar, &self.specials)?;
        let mut matcher = Matcher::new(self.factory.create_parser(source));
        // Without a token, this reports whether anything but the end may come, and errors of the grammar.
        matcher
            .consume_tokens(&[])
            .map_err(|e| Error::Invalid(format!("the output format cannot be enforced: {}", one_line(&e))))?;
        Ok(matcher)
    }
}

/// The state of a grammar within one answer.
struct Matching {
    matcher: Matcher,
    eos: Vec<u32>,
    vocab_size: usize,
}

impl std::fmt::Debug for Matching {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matching").field("stop_reason", &self.matcher.stop_reason()).finish_non_exhaustive()
    }
}

impl Constraint for Matching {
    fn mask(&mut self, logits: &mut [f32]) -> Result<()> {
        let allowed = (self.matcher.compute_mask_or_eos()).map_err(|e| {
            Error::Invalid(format!("the output format became too complex to enforce: simplify it ({})", one_line(&e)))
        })?;
        let words = allowed.as_slice();
        let known = logits.len().min(self.vocab_size);
        for (chunk, &word) in logits[..known].chunks_mut(32).zip(words) {
            if word == u32::MAX {
                continue;
            }
            for (bit, logit) in chunk.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        logits[known..].fill(f32::NEG_INFINITY);
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<()> {
        if self.matcher.is_stopped() && !self.matcher.is_error() && self.eos.contains(&token) {
            return Ok(());
        }
        (self.matcher.consume_token(token))
            .map_err(|e| Error::Invalid(format!("token {token} does not follow the output format: {}", one_line(&e))))
    }

    fn is_complete(&mut self) -> bool {
        self.matcher.is_stopped() && !self.matcher.is_error()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        // A shallow clone shares the lexer, and with it a lock.
        Box::new(Self { matcher: self.matcher.deep_clone(), eos: self.eos.clone(), vocab_size: self.vocab_size })
    }
}

/// The message of the grammar engine's error, without its dump of states.
fn one_line(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && *line != "<non-verbose/>");
    let first = lines.next().unwrap_or("no reason given");
    if first.starts_with("panic:") {
        return "it cannot be read".into();
    }
    // The error of an expression draws its place, and then says what is wrong.
    let reason = lines.next_back().filter(|_| first.ends_with(':')).map(|last| format!(" {last}")).unwrap_or_default();
    format!("{first}{reason}").chars().take(300).collect()
}

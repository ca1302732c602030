//! The prompts: different random words of about the wanted number of tokens, or the lines of a file.

use serde_json::{Value, json};

use super::Endpoint;
use crate::kernel::random::Random;
use crate::{Error, Result};

/// Common, short words: most tokenizers have one token for each. How many a server counts is measured.
const WORDS: [&str; 64] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money",
    "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side",
    "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law",
    "car",
];

/// Random numbers reserved for each prompt.
const DRAWS: u64 = 1 << 24;

/// One request's prompt.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum TestPrompt {
    Text(String),
    /// The messages of a chat, as in a line of a file.
    Messages(Value),
}

/// How many tokens a server counts for a prompt of `n` words: `template + per_word * n`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PromptLength {
    template: f64,
    per_word: f64,
}

impl PromptLength {
    /// The assumption for a server that does not count.
    pub(super) const UNKNOWN: Self = Self { template: 0.0, per_word: 1.0 };

    /// The line through two prompts as `(words, tokens)`. `None` if the counts do not fit one.
    pub(super) fn through(few: (usize, usize), many: (usize, usize)) -> Option<Self> {
        let per_word = (many.1 as f64 - few.1 as f64) / (many.0 as f64 - few.0 as f64);
        let template = (few.1 as f64 - per_word * few.0 as f64).max(0.0);
        (per_word.is_finite() && per_word > 0.0).then_some(Self { template, per_word })
    }

    /// Words for a prompt of `tokens` tokens; at least one.
    fn words(&self, tokens: usize) -> usize {
        ((tokens as f64 - self.template) / self.per_word).round().clamp(1.0, (DRAWS - 1) as f64) as usize
    }
}

/// Where prompts come from.
pub(super) enum Prompts {
    /// Random words; the first `shared` of them are the same in all prompts.
    Random { seed: u64, words: usize, shared: usize },
    /// One after another, then again from the start.
    Lines(Vec<TestPrompt>),
}

impl Prompts {
    /// Prompts of about `tokens` tokens. The first `shared` of them are the same.
    pub(super) fn random(seed: u64, tokens: usize, shared: usize, measure: PromptLength) -> Self {
        let words = measure.words(tokens);
        // The template's tokens start every prompt anyway.
        let shared = if shared == 0 { 0 } else { measure.words(shared).min(words) };
        Self::Random { seed, words, shared }
    }

    /// The prompt of request `number`: the same for the same number and seed.
    pub(super) fn get(&self, number: u64) -> TestPrompt {
        match self {
            Self::Lines(lines) => lines[(number % lines.len() as u64) as usize].clone(),
            Self::Random { seed, words, shared } => {
                // The first run of numbers is the shared prefix's.
                let prefix = draw(Random::at(*seed, 0), *shared);
                let own = draw(Random::at(*seed, (number + 1).wrapping_mul(DRAWS)), words - shared);
                TestPrompt::Text(prefix.chain(own).collect::<Vec<_>>().join(" "))
            }
        }
    }
}

fn draw(mut random: Random, words: usize) -> impl Iterator<Item = &'static str> {
    (0..words).map(move |_| WORDS[(random.bits() % WORDS.len() as u64) as usize])
}

/// The prompts of a file, one per line: text, a JSON string, or a JSON object with `prompt` or `messages`. Empty lines
/// are left out.
pub(super) fn parse(text: &str, endpoint: Endpoint) -> Result<Vec<TestPrompt>> {
    let wrong = |line: usize, why: &str| Error::Invalid(format!("line {} of --prompts {why}", line + 1));
    let mut prompts = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        prompts.push(match serde_json::from_str(line) {
            Ok(Value::String(text)) => TestPrompt::Text(text),
            Ok(Value::Object(mut object)) => match (object.remove("messages"), object.remove("prompt")) {
                (Some(messages), _) if messages.as_array().is_none_or(Vec::is_empty) => {
                    return Err(wrong(i, "has no list of messages in 'messages': write at least one message"));
                }
                (Some(_), _) if endpoint == Endpoint::Completions => {
                    return Err(wrong(i, "has messages: measure them with --endpoint chat"));
                }
                (Some(messages), _) => TestPrompt::Messages(messages),
                (None, Some(Value::String(text))) => TestPrompt::Text(text),
                (None, _) => {
                    return Err(wrong(i, "has neither 'messages' nor a string in 'prompt': add one of them"));
                }
            },
            Err(e) if line.trim_start().starts_with('{') => {
                return Err(wrong(i, &format!("is not the JSON it begins as: {e}")));
            }
            _ => TestPrompt::Text(line.to_string()),
        });
    }
    match prompts.is_empty() {
        true => Err(Error::Invalid("--prompts has no lines: write one prompt per line".into())),
        false => Ok(prompts),
    }
}

impl TestPrompt {
    /// The next turn of the conversation: the answer to this one, and one message more.
    pub(super) fn with_turn(self, answer: &str, message: Self) -> Self {
        let messages = |prompt: Self| match prompt.field(Endpoint::Chat).1 {
            Value::Array(messages) => messages,
            other => vec![other],
        };
        let answer = json!({"role": "assistant", "content": answer});
        Self::Messages([messages(self), vec![answer], messages(message)].concat().into())
    }

    /// The field of a request's body that carries it.
    pub(super) fn field(&self, endpoint: Endpoint) -> (String, Value) {
        match (endpoint, self) {
            (Endpoint::Chat, Self::Messages(messages)) => ("messages".into(), messages.clone()),
            (Endpoint::Chat, Self::Text(text)) => ("messages".into(), json!([{"role": "user", "content": text}])),
            (Endpoint::Completions, Self::Text(text)) => ("prompt".into(), json!(text)),
            (Endpoint::Completions, Self::Messages(_)) => unreachable!("refused when they were read"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(prompt: &TestPrompt) -> Vec<String> {
        let TestPrompt::Text(text) = prompt else { panic!("{prompt:?}") };
        text.split(' ').map(String::from).collect()
    }

    #[test]
    fn prompts_are_distinct_and_repeatable() {
        let prompts = Prompts::random(7, 100, 0, PromptLength::UNKNOWN);
        let first: Vec<_> = (0..200).map(|i| words(&prompts.get(i))).collect();
        assert!(first.iter().all(|words| words.len() == 100));
        // No two share more than a word or two at their start: nothing for a prefix cache.
        for i in 0..200 {
            for j in 0..i {
                assert!(first[i].iter().zip(&first[j]).take_while(|(a, b)| a == b).count() < 8, "{i} and {j}");
            }
        }
        assert_eq!(prompts.get(3), Prompts::random(7, 100, 0, PromptLength::UNKNOWN).get(3));
        assert_ne!(prompts.get(3), Prompts::random(8, 100, 0, PromptLength::UNKNOWN).get(3));
    }

    #[test]
    fn a_shared_prefix_is_shared_and_no_more() {
        let prompts = Prompts::random(7, 100, 60, PromptLength::UNKNOWN);
        let (a, b) = (words(&prompts.get(0)), words(&prompts.get(1)));
        assert_eq!(a.len(), 100);
        let common = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
        assert!((60..65).contains(&common), "{common}");
        let all = Prompts::random(7, 100, 100, PromptLength::UNKNOWN);
        assert_eq!(all.get(0), all.get(1));
    }

    #[test]
    fn words_are_counted_in_tokens() {
        let measure = PromptLength::through((16, 42), (128, 322)).unwrap(); // 2.5 a word and a template of 2
        assert_eq!(measure, PromptLength { template: 2.0, per_word: 2.5 });
        assert_eq!((measure.words(502), measure.words(1), measure.words(0)), (200, 1, 1));
        assert_eq!(measure.words(usize::MAX), (DRAWS - 1) as usize);
        // A server that counts nonsense.
        assert_eq!(PromptLength::through((16, 0), (128, 0)), None);
        assert_eq!(PromptLength::through((16, 9), (16, 9)), None);
        assert_eq!(PromptLength::through((16, 100), (128, 5)), None);
    }

    #[test]
    fn a_file_has_text_or_json() {
        let text = "plain\n\n\"a\\nb\"\n{\"prompt\": \"c\", \"id\": 1}\n[INST] x\n42\n{\"messages\": [{\"role\": \
                    \"user\", \"content\": \"d\"}]}\n";
        let prompts = parse(text, Endpoint::Chat).unwrap();
        let texts: Vec<_> = prompts[..5].iter().map(|p| p.clone().field(Endpoint::Completions).1).collect();
        assert_eq!(texts, ["plain", "a\nb", "c", "[INST] x", "42"]);
        assert_eq!(prompts[5].field(Endpoint::Chat).1, json!([{"role": "user", "content": "d"}]));
        assert_eq!(
            prompts[0].field(Endpoint::Chat),
            ("messages".into(), json!([{"role": "user", "content": "plain"}]))
        );
        assert_eq!(Prompts::Lines(prompts.clone()).get(7), prompts[1]);
    }

    #[test]
    fn a_turn_sends_what_was_said() {
        let of = |text: &str| TestPrompt::Text(text.into());
        let turn = of("a").with_turn("b", of("c")).with_turn("d", of("e"));
        let TestPrompt::Messages(Value::Array(messages)) = turn else { panic!("{turn:?}") };
        let said: Vec<_> =
            messages.iter().map(|m| (m["role"].as_str().unwrap(), m["content"].as_str().unwrap())).collect();
        assert_eq!(said, [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]);
    }

    #[test]
    fn lines_that_cannot_be_asked_are_named() {
        for (text, want) in [
            ("ok\n{\"prompt\"", "line 2 of --prompts is not the JSON"),
            ("{\"prompt\": 1}", "line 1 of --prompts has neither"),
            ("{\"messages\": []}", "line 1 of --prompts has no list"),
            ("{\"messages\": \"x\"}", "line 1 of --prompts has no list"),
            ("\n \n", "--prompts has no lines"),
        ] {
            assert!(parse(text, Endpoint::Chat).is_err_and(|e| e.to_string().contains(want)), "{text}");
        }
        assert!(
            parse("{\"messages\": [{}]}", Endpoint::Completions)
                .is_err_and(|e| e.to_string().contains("--endpoint chat"))
        );
    }
}

//! One request of the OpenAI API and its streamed answer, timed.

use std::time::{Duration, Instant};

use hyper::Method;
use hyper::body::Bytes;
use serde_json::{Map, Value, json};

use super::Endpoint;
use super::client::HttpClient;
use super::prompts::TestPrompt;
use super::report::{FailedRequest, FailureKind, one_line};
use super::sse;
use crate::{Error, Result};

/// Bytes to read of an error, or of a list of models.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// A server, and the fields that it accepts.
pub(super) struct Api {
    pub(super) client: HttpClient,
    pub(super) endpoint: Endpoint,
    pub(super) model: String,
    pub(super) timeout: Duration, // of one request
    pub(super) fields: ExactFields,
}

/// Fields that make a measurement exact. Not every server accepts them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ExactFields {
    ignore_eos: bool,
    include_usage: bool,
    max_completion_tokens: bool, // the newer name of `max_tokens`
}

impl Default for ExactFields {
    fn default() -> Self {
        Self { ignore_eos: true, include_usage: true, max_completion_tokens: false }
    }
}

impl ExactFields {
    /// Leaves out the field that a server has refused. Returns what that means; `None` when the failure is about
    /// something else.
    pub(super) fn give_way(&mut self, failure: &FailedRequest) -> Option<&'static str> {
        const NO_EOS: &str = "the server refuses 'ignore_eos': answers may be shorter than asked";
        const NO_USAGE: &str = "the server refuses 'stream_options': tokens are counted as chunks";
        if !matches!(failure.kind, FailureKind::Http(400 | 422)) {
            return None;
        }
        let named = |name| failure.message.contains(name);
        if named("max_completion_tokens") && !self.max_completion_tokens {
            self.max_completion_tokens = true;
            return Some(
                "the server wants 'max_completion_tokens' instead of 'max_tokens', which counts reasoning too",
            );
        }
        let eos = self.ignore_eos && named("ignore_eos");
        let usage = self.include_usage && (named("stream_options") || named("include_usage"));
        // The refusal names neither field: leave out both.
        let (eos, usage) = if eos || usage { (eos, usage) } else { (self.ignore_eos, self.include_usage) };
        (self.ignore_eos, self.include_usage) = (self.ignore_eos && !eos, self.include_usage && !usage);
        match (eos, usage) {
            (true, true) => Some(
                "the server refuses 'ignore_eos' or 'stream_options': answers may be shorter, tokens are counted as \
                 chunks",
            ),
            (true, false) => Some(NO_EOS),
            (false, true) => Some(NO_USAGE),
            (false, false) => None,
        }
    }
}

/// A streamed answer; times count from the request's start.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Answered {
    pub(super) first: Duration,   // chunk with text
    pub(super) last: Duration,    // chunk with text
    pub(super) end: Duration,     // of the stream
    pub(super) chunks: usize,     // with text
    pub(super) gaps_ms: Vec<f64>, // between chunks with text
    pub(super) text: String,      // without reasoning and calls of tools
    pub(super) usage: TokenCounts,
}

/// The server's token counts, as far as it sends them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct TokenCounts {
    pub(super) prompt_tokens: Option<u64>,
    pub(super) completion_tokens: Option<u64>,
    pub(super) cached_tokens: Option<u64>,
}

impl Answered {
    /// Whether the server counted the answer's tokens.
    pub(super) fn is_counted(&self) -> bool {
        self.usage.completion_tokens.is_some_and(|tokens| tokens > 0)
    }

    /// Tokens of the answer as the server counts them, else its chunks.
    pub(super) fn tokens(&self) -> u64 {
        self.usage.completion_tokens.filter(|_| self.is_counted()).unwrap_or(self.chunks as u64)
    }

    /// Mean milliseconds between two tokens. `None` if there are fewer than two, or all came at once.
    pub(super) fn inter_token_ms(&self) -> Option<f64> {
        let more = self.tokens().saturating_sub(1);
        (more > 0 && self.chunks > 1).then(|| 1e3 * (self.last - self.first).as_secs_f64() / more as f64)
    }
}

impl Api {
    /// The body of a request for `max_tokens` tokens.
    pub(super) fn body(&self, prompt: &TestPrompt, max_tokens: usize) -> Bytes {
        let ExactFields { ignore_eos, include_usage, max_completion_tokens } = self.fields;
        let length = if max_completion_tokens { "max_completion_tokens" } else { "max_tokens" };
        let mut body = Map::from_iter([
            ("model".to_string(), json!(self.model)),
            prompt.field(self.endpoint),
            (length.into(), json!(max_tokens)),
            ("stream".into(), json!(true)),
        ]);
        if include_usage {
            body.insert("stream_options".into(), json!({"include_usage": true}));
        }
        if ignore_eos {
            body.insert("ignore_eos".into(), json!(true));
        }
        Value::Object(body).to_string().into()
    }

    /// Sends a request and reads its answer. All times count from `start`, which is now or a little earlier.
    pub(super) async fn ask(&self, body: Bytes, start: Instant) -> std::result::Result<Answered, FailedRequest> {
        match tokio::time::timeout_at((start + self.timeout).into(), self.answer(body, start)).await {
            Ok(result) => result,
            Err(_) => {
                Err(FailedRequest::new(FailureKind::Timeout, format!("no end within {} s", self.timeout.as_secs_f64())))
            }
        }
    }

    async fn answer(&self, body: Bytes, start: Instant) -> std::result::Result<Answered, FailedRequest> {
        let path = match self.endpoint {
            Endpoint::Chat => "/chat/completions",
            Endpoint::Completions => "/completions",
        };
        let mut answer = self.client.send(Method::POST, path, body).await?;
        if answer.status() != 200 {
            let kind = FailureKind::Http(answer.status());
            return Err(FailedRequest::new(
                kind,
                error_message(&answer.text(MAX_TEXT_BYTES).await.unwrap_or_default()),
            ));
        }
        if answer.is_json() {
            let text = answer.text(MAX_TEXT_BYTES).await?;
            return Err(FailedRequest::new(
                FailureKind::Malformed,
                format!("one JSON object instead of a stream: {}", error_message(&text)),
            ));
        }
        let (mut parser, mut reading) = (sse::EventParser::default(), Reading::default());
        while let Some(bytes) = answer.chunk().await? {
            let now = start.elapsed();
            if parser.push(&bytes, &mut |data| reading.event(&data, now)).is_err() {
                return Err(FailedRequest::new(
                    FailureKind::Malformed,
                    format!("an event of more than {} KiB", sse::MAX_EVENT_BYTES >> 10),
                ));
            }
            if let Some(failure) = reading.failure.take() {
                return Err(failure);
            }
        }
        parser.finish(&mut |data| reading.event(&data, start.elapsed()));
        reading.finish(start.elapsed())
    }

    /// The model of a server that has only one.
    pub(super) async fn only_model(client: &HttpClient, timeout: Duration) -> Result<String> {
        let ask = async {
            let answer = client.send(Method::GET, "/models", Bytes::new()).await?;
            let status = answer.status();
            Ok((status, answer.text(MAX_TEXT_BYTES).await?))
        };
        let failed = |failure: FailedRequest| cannot("the list of models", &failure);
        let slow = |_| failed(FailedRequest::new(FailureKind::Timeout, "no answer"));
        let (status, text) = tokio::time::timeout(timeout, ask).await.map_err(slow)?.map_err(failed)?;
        if status != 200 {
            return Err(failed(FailedRequest::new(FailureKind::Http(status), error_message(&text))));
        }
        let list: Value = serde_json::from_str(&text).unwrap_or_default();
        let names: Vec<&str> =
            list["data"].as_array().into_iter().flatten().filter_map(|model| model["id"].as_str()).collect();
        match names[..] {
            [name] => Ok(name.to_string()),
            [] => Err(Error::Invalid("the server lists no models: name the model with --model".into())),
            [one, two, ..] => {
                let names = format!("{}, {}", one_line(one), one_line(two));
                Err(Error::Invalid(format!("the server has several models ({names}, ...): choose one with --model")))
            }
        }
    }
}

/// An error that ends the run, with a remedy.
pub(super) fn cannot(what: &str, failure: &FailedRequest) -> Error {
    let remedy = match failure.kind {
        FailureKind::Connect => "start the server, or check --url and, for https, SSL_CERT_FILE",
        FailureKind::Http(401 | 403) => "give the server's key with --api-key-file",
        FailureKind::Http(404) => "check --url, which usually ends in /v1, and --model",
        FailureKind::Http(400 | 413 | 422) => {
            "check --prompt-tokens, --output-tokens and --endpoint against the server's limits"
        }
        FailureKind::Timeout => "raise --timeout, or find out why the server is slow",
        FailureKind::Malformed => "check that --url is an OpenAI-compatible API",
        _ => "check the server's log",
    };
    Error::Invalid(format!(
        "cannot get {what} from the server ({}: {}): {remedy}",
        failure.kind,
        one_line(&failure.message)
    ))
}

/// The message of an error, in the formats of common servers.
fn error_message(text: &str) -> String {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    let said = [&value["error"]["message"], &value["error"], &value["message"], &value["detail"]]
        .into_iter()
        .find_map(Value::as_str);
    one_line(said.unwrap_or(text))
}

/// An answer while it is read.
#[derive(Default)]
struct Reading {
    answered: Answered,
    finished: bool, // a reason or [DONE] was seen
    failure: Option<FailedRequest>,
}

impl Reading {
    fn event(&mut self, data: &str, now: Duration) {
        if self.failure.is_some() || data.is_empty() {
            return;
        }
        if data.trim() == "[DONE]" {
            self.finished = true;
            self.answered.end = now;
            return;
        }
        let Ok(chunk @ Value::Object(_)) = serde_json::from_str::<Value>(data) else {
            self.failure =
                Some(FailedRequest::new(FailureKind::Malformed, format!("not a JSON object: {}", one_line(data))));
            return;
        };
        if !chunk["error"].is_null() {
            self.failure = Some(FailedRequest::new(FailureKind::Reported, error_message(data)));
            return;
        }
        if let Some(usage) = chunk["usage"].as_object() {
            let count = |name: &str| usage.get(name).and_then(Value::as_u64);
            self.answered.usage = TokenCounts {
                prompt_tokens: count("prompt_tokens"),
                completion_tokens: count("completion_tokens"),
                cached_tokens: usage.get("prompt_tokens_details").and_then(|details| details["cached_tokens"].as_u64()),
            };
        }
        let choices = chunk["choices"].as_array().map_or(&[][..], Vec::as_slice);
        self.finished |= choices.iter().any(|choice| choice["finish_reason"].is_string());
        if choices.iter().any(has_text) {
            self.text(now);
        }
        self.answered.text.extend(choices.iter().filter_map(|choice| choice["delta"]["content"].as_str()));
    }

    fn text(&mut self, now: Duration) {
        let answered = &mut self.answered;
        match answered.chunks {
            0 => answered.first = now,
            _ => answered.gaps_ms.push(1e3 * (now - answered.last).as_secs_f64()),
        }
        answered.last = now;
        answered.chunks += 1;
    }

    fn finish(mut self, now: Duration) -> std::result::Result<Answered, FailedRequest> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        if !self.finished {
            let chunks = self.answered.chunks;
            return Err(FailedRequest::new(
                FailureKind::Broken,
                format!("it ended after {chunks} chunks, without a reason or [DONE]"),
            ));
        }
        if self.answered.end.is_zero() {
            self.answered.end = now; // some servers say no [DONE]
        }
        Ok(self.answered)
    }
}

/// Whether a chunk's choice has generated text: an answer, reasoning, or a call of a tool.
fn has_text(choice: &Value) -> bool {
    let delta = &choice["delta"];
    let texts =
        [&choice["text"], &delta["content"], &delta["reasoning_content"], &delta["reasoning"], &delta["refusal"]];
    texts.iter().any(|text| text.as_str().is_some_and(|text| !text.is_empty()))
        || delta["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn read(events: &[(u64, &str)]) -> std::result::Result<Answered, FailedRequest> {
        let mut reading = Reading::default();
        for (at, data) in events {
            reading.event(data, ms(*at));
        }
        reading.finish(ms(100))
    }

    #[test]
    fn an_answer_is_timed_by_its_chunks_with_text() {
        let answered = read(&[
            (1, r#"{"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}"#),
            (10, r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#),
            (15, r#"{"choices":[{"delta":{"content":"a"},"finish_reason":null}]}"#),
            (25, r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#),
            (30, r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#),
            (
                31,
                r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,
                "prompt_tokens_details":{"cached_tokens":5}}}"#,
            ),
            (32, "[DONE]"),
        ]);
        let usage = TokenCounts { prompt_tokens: Some(9), completion_tokens: Some(4), cached_tokens: Some(5) };
        let want = Answered {
            first: ms(10),
            last: ms(25),
            end: ms(32),
            chunks: 3,
            gaps_ms: vec![5.0, 10.0],
            text: "a".into(),
            usage,
        };
        assert_eq!(answered.unwrap(), want);
    }

    #[test]
    fn streams_end_in_many_ways() {
        let text = (5, r#"{"choices":[{"text":"a"}]}"#);
        let end = read(&[text, (7, r#"{"choices":[{"text":"","finish_reason":"stop"}]}"#)]).unwrap();
        assert_eq!((end.first, end.end, end.chunks), (ms(5), ms(100), 1));
        assert_eq!(read(&[text, (8, " [DONE] ")]).unwrap().end, ms(8));
        let kind = |events: &[(u64, &str)]| read(events).unwrap_err().kind;
        assert_eq!(kind(&[text]), FailureKind::Broken);
        assert_eq!(kind(&[]), FailureKind::Broken);
        assert_eq!(kind(&[text, (6, "{\"choices\": [")]), FailureKind::Malformed);
        assert_eq!(kind(&[text, (6, "[1]"), (7, "[DONE]")]), FailureKind::Malformed);
        assert_eq!(
            kind(&[text, (6, r#"{"error":{"message":"out of memory"}}"#), (7, "[DONE]")]),
            FailureKind::Reported
        );
        // Unknown shapes count as no text, without a panic.
        assert_eq!(
            read(&[(1, r#"{"choices":null,"usage":7}"#), (2, r#"{"choices":[1,{"delta":null}]}"#), (3, "[DONE]")])
                .unwrap()
                .chunks,
            0
        );
    }

    #[test]
    fn refused_fields_give_way() {
        let refusal = |status, message: &str| FailedRequest::new(FailureKind::Http(status), message);
        let mut fields = ExactFields::default();
        assert!(fields.give_way(&refusal(404, "ignore_eos")).is_none());
        assert!(
            fields
                .give_way(&refusal(400, "Unrecognized request argument supplied: ignore_eos"))
                .unwrap()
                .contains("shorter")
        );
        assert!(!fields.ignore_eos && fields.include_usage);
        assert!(fields.give_way(&refusal(400, "use 'max_completion_tokens' instead")).is_some());
        assert!(
            fields.give_way(&refusal(422, "stream_options: extra fields not permitted")).unwrap().contains("chunks")
        );
        assert!(fields.give_way(&refusal(400, "no")).is_none());
        let mut fields = ExactFields::default();
        assert!(fields.give_way(&refusal(400, "no")).is_some());
        assert!(fields.give_way(&refusal(400, "no")).is_none());
    }

    #[test]
    fn errors_are_read_in_many_shapes() {
        for text in
            [r#"{"error":{"message":"m"}}"#, r#"{"error":"m"}"#, r#"{"message":"m"}"#, r#"{"detail":"m"}"#, "m", " m\n"]
        {
            assert_eq!(error_message(text), "m");
        }
        assert_eq!(error_message("[1]"), "[1]");
    }
}

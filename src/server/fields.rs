//! Reads a request body field by field. Fields left unread at the end are refused by name, so none is ignored silently.

use serde_json::{Map, Value, json};

use super::error::ApiError;

type Result<T> = std::result::Result<T, ApiError>;

/// Fields that do not change the answer: bookkeeping of OpenAI's own service.
const HARMLESS: [&str; 7] =
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"];

/// The unread members of a JSON object. Null counts as absent.
pub(super) struct RequestFields(Map<String, Value>);

impl RequestFields {
    /// Parses a body.
    pub(super) fn parse(body: &[u8]) -> Result<Self> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self(map)),
            Ok(_) => Err(ApiError::bad_request("The request body must be a JSON object")),
            Err(e) => Err(ApiError::bad_request(format!("The request body is not valid JSON: {e}"))),
        }
    }

    /// The fields of an object within a body.
    pub(super) fn from(map: Map<String, Value>) -> Self {
        Self(map)
    }

    /// Takes a field of any type.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    fn take_as<T>(&mut self, name: &str, what: &str, convert: impl Fn(Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| ApiError::bad_field(name, format!("'{name}' must be {what}")))
    }

    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>> {
        self.take_as(name, "a string", |value| match value {
            Value::String(text) => Some(text),
            _ => None,
        })
    }

    pub(super) fn boolean(&mut self, name: &str) -> Result<Option<bool>> {
        self.take_as(name, "true or false", |value| value.as_bool())
    }

    pub(super) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>> {
        self.take_as(name, "an object", |value| match value {
            Value::Object(map) => Some(map),
            _ => None,
        })
    }

    /// A number in `range`.
    pub(super) fn number(&mut self, name: &str, range: std::ops::RangeInclusive<f64>) -> Result<Option<f32>> {
        let what = format!("a number from {} to {}", range.start(), range.end());
        self.take_as(name, &what, |value| value.as_f64().filter(|x| range.contains(x)).map(|x| x as f32))
    }

    /// A whole number of at least `least`.
    pub(super) fn integer(&mut self, name: &str, least: u64) -> Result<Option<usize>> {
        let what = format!("a whole number of at least {least}");
        self.take_as(name, &what, |value| value.as_u64().filter(|&n| n >= least).and_then(|n| usize::try_from(n).ok()))
    }

    /// A seed: any 64-bit whole number, also a negative one.
    pub(super) fn seed(&mut self) -> Result<Option<u64>> {
        self.take_as("seed", "a whole number of 64 bits", |value| {
            value.as_u64().or(value.as_i64().map(i64::cast_unsigned))
        })
    }

    /// Refuses a known field that this server does not support, unless its value is the default.
    pub(super) fn only(&mut self, name: &str, neutral: &[Value]) -> Result<()> {
        match self.take(name) {
            Some(value) if !neutral.contains(&value) => Err(ApiError::unsupported(name)),
            _ => Ok(()),
        }
    }

    /// Refuses the remaining fields, except harmless ones. Fields of OpenAI's API are refused as unsupported, others as
    /// unknown.
    pub(super) fn finish(mut self) -> Result<()> {
        for (name, neutral) in [
            ("suffix", &[json!("")][..]),
            ("functions", &[json!([])]),
            ("function_call", &[json!("none"), json!("auto")]),
            ("modalities", &[json!(["text"])]),
            ("audio", &[]),
            ("prediction", &[]),
            ("verbosity", &[]),
            ("web_search_options", &[]),
        ] {
            self.only(name, neutral)?;
        }
        match self.0.into_iter().find(|(name, value)| !value.is_null() && !HARMLESS.contains(&name.as_str())) {
            Some((name, _)) => Err(ApiError::unknown_field(&name)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(body: Value) -> String {
        RequestFields::parse(body.to_string().as_bytes()).unwrap().finish().unwrap_err().to_json()["error"]["param"]
            .to_string()
    }

    #[test]
    fn nothing_is_left_unread() {
        let neutral = json!({"modalities": ["text"], "functions": [], "suffix": "", "user": "me", "audio": null});
        assert!(RequestFields::parse(neutral.to_string().as_bytes()).unwrap().finish().is_ok());
        assert_eq!(refusal(json!({"modalities": ["audio"]})), "\"modalities\"");
        assert_eq!(refusal(json!({"functions": [{}]})), "\"functions\"");
        assert_eq!(refusal(json!({"temprature": 1})), "\"temprature\"");
    }

    #[test]
    fn types_and_ranges_are_checked() {
        let mut fields =
            RequestFields::parse(br#"{"a":"x","b":1e999999,"c":3,"d":-1,"seed":-5,"e":1.5}"#).err().map_or_else(
                || RequestFields::parse(b"{}").unwrap(),
                |_| RequestFields::parse(br#"{"a":"x","c":3,"d":-1,"seed":-5,"e":1.5}"#).unwrap(),
            );
        assert!(fields.number("a", 0.0..=2.0).is_err());
        assert!(fields.number("c", 0.0..=2.0).is_err());
        assert!(fields.integer("d", 0).is_err());
        assert!(fields.integer("e", 0).is_err());
        assert_eq!(fields.seed().unwrap(), Some(u64::MAX - 4));
        assert!(fields.string("absent").unwrap().is_none());
    }

    #[test]
    fn hostile_bodies_are_refused() {
        let deep = "[".repeat(100_000);
        for body in [
            &b""[..],
            b"[]",
            b"null",
            b"{",
            b"{\"a\":\"\xff\"}",
            b"{\"a\":\"\\ud800\"}",
            b"{\"a\":1}}",
            deep.as_bytes(),
        ] {
            assert!(RequestFields::parse(body).is_err());
        }
    }
}

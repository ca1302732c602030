//! Tools of a request: their definitions, and how they may be called.

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::RequestFields;
use crate::text::reply::{Calls, Tool, ToolChoice};

type Result<T> = std::result::Result<T, ApiError>;

/// Maximum tools of one request.
const MAX_TOOLS: usize = 256;

/// Maximum bytes of tool definitions, since a grammar may be made of them.
pub(super) const MAX_TOOL_BYTES: usize = 1 << 20;

/// Tools, and how they may be called.
pub(super) struct Tools {
    pub(super) list: Vec<Tool>,
    pub(super) choice: ToolChoice,
    /// How many calls one answer may make.
    pub(super) calls: Calls,
}

impl Default for Tools {
    fn default() -> Self {
        Self { list: Vec::new(), choice: ToolChoice::Auto, calls: Calls::Several }
    }
}

impl Tools {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls` as OpenAI's chat completions have them.
    pub(super) fn read(fields: &mut RequestFields) -> Result<Self> {
        let list = match fields.take("tools") {
            None => Vec::new(),
            Some(Value::Array(list)) => list,
            Some(_) => return Err(ApiError::bad_field("tools", "'tools' must be a list")),
        };
        let list = list.iter().enumerate().map(|(i, tool)| {
            let place = format!("tools[{i}]");
            match tool["type"].as_str() {
                Some("function") => read_function(&format!("{place}.function"), &tool["function"]),
                Some(_) => Err(ApiError::unsupported(&format!("{place}.type"))),
                None => Err(ApiError::bad_field(&place, format!("{place} must be an object of type \"function\""))),
            }
        });
        let list = check_tools(list.collect::<Result<Vec<_>>>()?)?;
        let choice = match fields.take("tool_choice") {
            None => ToolChoice::Auto,
            Some(Value::String(word)) => choice_by_word(&word)?,
            Some(choice) => match (choice["type"].as_str(), choice["function"]["name"].as_str()) {
                (Some("function"), Some(name)) => ToolChoice::Named(name.into()),
                _ => return Err(wrong_choice()),
            },
        };
        Self { list, choice, calls: read_calls(fields)? }.check()
    }

    /// Refuses a choice that is not in the list.
    pub(super) fn check(self) -> Result<Self> {
        let known = |name: &String| self.list.iter().any(|tool| &tool.name == name);
        match &self.choice {
            ToolChoice::Named(name) if !known(name) => Err(ApiError::bad_field(
                "tool_choice",
                format!("'tool_choice' names '{name}', which is not in 'tools'"),
            )),
            ToolChoice::Required if self.list.is_empty() => {
                Err(ApiError::bad_field("tool_choice", "'tool_choice' requires a call, but there are no tools"))
            }
            _ => Ok(self),
        }
    }
}

/// How many calls `parallel_tool_calls` allows.
pub(super) fn read_calls(fields: &mut RequestFields) -> Result<Calls> {
    Ok(match fields.boolean("parallel_tool_calls")? {
        Some(false) => Calls::One,
        _ => Calls::Several,
    })
}

/// Parses `none`, `auto` or `required`.
pub(super) fn choice_by_word(word: &str) -> Result<ToolChoice> {
    match word {
        "none" => Ok(ToolChoice::None),
        "auto" => Ok(ToolChoice::Auto),
        "required" => Ok(ToolChoice::Required),
        _ => Err(wrong_choice()),
    }
}

pub(super) fn wrong_choice() -> ApiError {
    ApiError::bad_field("tool_choice", "'tool_choice' must be \"none\", \"auto\", \"required\", or name a function")
}

/// Refuses too many tools, too large ones, and two of one name.
pub(super) fn check_tools(tools: Vec<Tool>) -> Result<Vec<Tool>> {
    let bytes: usize = tools.iter().map(|tool| tool_json(tool).to_string().len()).sum();
    if tools.len() > MAX_TOOLS || bytes > MAX_TOOL_BYTES {
        let message = format!("'tools' may have at most {MAX_TOOLS} entries and {MAX_TOOL_BYTES} bytes in all");
        return Err(ApiError::bad_field("tools", message));
    }
    let mut names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(ApiError::bad_field("tools", format!("'tools' has two functions called '{}'", pair[0]))),
        None => Ok(tools),
    }
}

/// A tool as chat templates expect it.
pub(super) fn tool_json(tool: &Tool) -> Value {
    let mut function = Map::from_iter([("name".to_string(), json!(tool.name))]);
    function.extend(tool.description.as_ref().map(|text| ("description".to_string(), json!(text))));
    function.insert("parameters".into(), tool.parameters.clone());
    json!({"type": "function", "function": function})
}

/// A function's definition: name, description, parameters, strict.
pub(super) fn read_function(place: &str, function: &Value) -> Result<Tool> {
    let wrong = |what: &str| ApiError::bad_field(place, format!("{place} {what}"));
    let Some(map) = function.as_object() else { return Err(wrong("must be an object with a name")) };
    if let Some(unknown) =
        map.keys().find(|name| !["type", "name", "description", "parameters", "strict"].contains(&name.as_str()))
    {
        return Err(ApiError::unsupported(&format!("{place}.{unknown}")));
    }
    let valid = |name: &&str| {
        (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
    };
    let name = map.get("name").and_then(Value::as_str).filter(valid);
    let name =
        name.ok_or_else(|| wrong("must have a name of at most 64 letters, digits, dashes, dots and underscores"))?;
    let parameters = match map.get("parameters") {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(_) => return Err(wrong("must have a JSON schema as its parameters")),
    };
    let description = map.get("description").and_then(Value::as_str).map(String::from);
    let strict = map.get("strict").and_then(Value::as_bool).unwrap_or(false);
    Ok(Tool { name: name.into(), description, parameters, strict })
}

//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Value, json};

use super::App;
use super::ask::token_ids;
use super::body::understand;
use super::conversation::Conversation;
use super::error::ApiError;
use super::front::Caller;
use super::text::encode_text;
use crate::text::model::TextModel;

type Result<T> = std::result::Result<T, ApiError>;

/// Answers `/tokenize`: token ids of `prompt`, or of `messages` and `tools` in the chat template.
pub(super) async fn tokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response> {
    let answer = understand(&app, caller.client, body, |model, fields| {
        let ids = match fields.string("prompt")? {
            Some(text) => {
                let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
                encode_text(model, "prompt", &text, special)?
            }
            None => Conversation::read(model, fields)?.prompt(model)?.ids,
        };
        let spelled = fields.boolean("return_token_strs")?.unwrap_or(false);
        tokenized(model, &ids, spelled)
    });
    Ok(([(CONTENT_TYPE, "application/json")], answer.await?).into_response())
}

/// Writes the answer as text: as values, a million tokens would take a hundred times the memory.
fn tokenized(model: &TextModel, ids: &[u32], spelled: bool) -> Result<String> {
    let list = |one: &dyn Fn(u32) -> crate::Result<String>| -> crate::Result<String> {
        let mut list = String::from("[");
        for (i, &id) in ids.iter().enumerate() {
            list += if i > 0 { "," } else { "" };
            list += &one(id)?;
        }
        Ok(list + "]")
    };
    let numbers = list(&|id| Ok(id.to_string()))?;
    let texts = match spelled {
        true => list(&|id| Ok(Value::from(model.tokenizer().decode(&[id], false)?).to_string()))?,
        false => "null".into(),
    };
    let (count, limit) = (ids.len(), model.engine().info().max_context);
    Ok(format!(r#"{{"count":{count},"max_model_len":{limit},"tokens":{numbers},"token_strs":{texts}}}"#))
}

/// Answers `/detokenize`: the text of `tokens`.
pub(super) async fn detokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<Value>> {
    let answer = understand(&app, caller.client, body, |model, fields| {
        let tokens = fields.take("tokens").ok_or_else(|| ApiError::bad_field("tokens", "'tokens' is missing"))?;
        let ids = token_ids(model, "tokens", &tokens)?;
        drop(tokens); // decoding takes as much
        Ok(json!({"prompt": model.tokenizer().decode(&ids, false)?}))
    });
    Ok(Json(answer.await?))
}

//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde_json::{Value, json};

use super::App;
use super::ask::{token_ids, understand};
use super::conversation::Conversation;
use super::error::ApiError;

type Result<T> = std::result::Result<T, ApiError>;

/// Token ids of `prompt`, or of what the chat template makes of `messages` (and `tools`).
pub(super) async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>> {
    let told = understand(&app, body, |model, fields| {
        let ids = match fields.string("prompt")? {
            Some(text) => {
                let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
                model.tokenizer().encode(&text, special)?
            }
            None => Conversation::read(model, fields)?.prompt(model)?.ids,
        };
        let spelled = match fields.boolean("return_token_strs")? {
            Some(true) => Some(ids.iter().map(|&id| model.tokenizer().decode(&[id], false)).collect::<crate::Result<Vec<_>>>()?),
            _ => None,
        };
        let limit = model.engine().info().max_context;
        Ok(json!({"count": ids.len(), "max_model_len": limit, "tokens": ids, "token_strs": spelled}))
    });
    Ok(Json(told.await?))
}

/// The text of `tokens`.
pub(super) async fn detokenize(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>> {
    let told = understand(&app, body, |model, fields| {
        let tokens = fields.take("tokens").ok_or_else(|| ApiError::bad_field("tokens", "'tokens' is missing"))?;
        let ids = token_ids(model, "tokens", &tokens)?;
        Ok(json!({"prompt": model.tokenizer().decode(&ids, false)?}))
    });
    Ok(Json(told.await?))
}

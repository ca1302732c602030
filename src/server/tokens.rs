//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde_json::{Value, json};

use super::App;
use super::ask::{off_thread, read_body, token_ids};
use super::conversation::Conversation;
use super::error::ApiError;
use super::fields::Fields;

type Result<T> = std::result::Result<T, ApiError>;

/// Token ids of `prompt`, or of what the chat template makes of `messages` (and `tools`).
pub(super) async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>> {
    let body = read_body(&app, body).await?;
    off_thread(move || {
        let mut fields = Fields::parse(&body)?;
        let model = app.model()?;
        if let Some(name) = fields.string("model")? {
            app.check_model(&name)?;
        }
        let ids = match fields.string("prompt")? {
            Some(text) => {
                let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
                model.tokenizer().encode(&text, special)?
            }
            None => Conversation::read(model, &mut fields)?.prompt(model)?.ids,
        };
        let spelled = match fields.boolean("return_token_strs")? {
            Some(true) => Some(ids.iter().map(|&id| model.tokenizer().decode(&[id], false)).collect::<crate::Result<Vec<_>>>()?),
            _ => None,
        };
        fields.finish()?;
        let limit = model.engine().info().max_context;
        Ok(Json(json!({"count": ids.len(), "max_model_len": limit, "tokens": ids, "token_strs": spelled})))
    })
    .await
}

/// The text of `tokens`.
pub(super) async fn detokenize(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>> {
    let body = read_body(&app, body).await?;
    off_thread(move || {
        let mut fields = Fields::parse(&body)?;
        let model = app.model()?;
        if let Some(name) = fields.string("model")? {
            app.check_model(&name)?;
        }
        let tokens = fields.take("tokens").ok_or_else(|| ApiError::bad_field("tokens", "'tokens' is missing"))?;
        let ids = token_ids(model, "tokens", &tokens)?;
        fields.finish()?;
        Ok(Json(json!({"prompt": model.tokenizer().decode(&ids, false)?})))
    })
    .await
}

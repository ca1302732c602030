//! `/health`, `/ready` and `/v1/models`: whether the server works, and with which model.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::App;
use super::error::ApiError;
use crate::Error;

type Result<T> = std::result::Result<T, ApiError>;

/// `/health`: whether the process works, also while a model is being loaded. For supervisors.
pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    match app.model.get() {
        None => Json(json!({"status": "loading"})).into_response(),
        Some(model) if model.engine().is_running() => Json(json!({"status": "ok"})).into_response(),
        Some(_) => ApiError::from(Error::Stopped("restart the server".into())).into_response(),
    }
}

/// `/ready`: whether requests would be answered. For load balancers.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Result<Response> {
    app.model()?;
    Ok(health(State(app)).await)
}

pub(super) async fn models(State(app): State<Arc<App>>) -> Result<Json<Value>> {
    let model = app.describe()?;
    let id = model["id"].clone();
    Ok(Json(json!({"object": "list", "data": [model], "has_more": false, "first_id": id, "last_id": id})))
}

pub(super) async fn model_by_name(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>> {
    app.check_model(&name)?;
    Ok(Json(app.describe()?))
}

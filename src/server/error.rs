//! Every refusal in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::Error;

/// An HTTP status with OpenAI's error object.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>, param: Option<&str>, code: Option<&'static str>) -> Self {
        Self { status, message: message.into(), param: param.map(String::from), code }
    }

    /// The request cannot be understood at all.
    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message, None, None)
    }

    /// A body that did not arrive: too large, or cut off.
    pub(super) fn body(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, message, None, None)
    }

    /// A field has the wrong type or a value out of range.
    pub(super) fn bad_field(param: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message, Some(param), Some("invalid_value"))
    }

    /// A field that is known and would change the answer, which we cannot do.
    pub(super) fn unsupported(param: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, format!("'{param}' is not supported by this server"), Some(param), Some("unsupported_parameter"))
    }

    /// A field nobody knows.
    pub(super) fn unknown_field(param: &str) -> Self {
        Self::new(
            StatusCode::BAD_REQUEST,
            format!("Unrecognized request argument supplied: {param}"),
            Some(param),
            Some("unknown_parameter"),
        )
    }

    pub(super) fn no_such_model(asked: &str, served: &str) -> Self {
        let message = format!("The model '{asked}' does not exist; this server serves '{served}'");
        Self::new(StatusCode::NOT_FOUND, message, Some("model"), Some("model_not_found"))
    }

    pub(super) fn no_such_route(path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("There is nothing at {path}"), None, Some("unknown_url"))
    }

    pub(super) fn wrong_method(method: &Method, path: &str) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, format!("{path} does not take {method}"), None, Some("method_not_allowed"))
    }

    /// The prompt leaves no room for an answer.
    pub(super) fn context_length(message: String, param: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message, Some(param), Some("context_length_exceeded"))
    }

    /// A bug of ours in one request.
    pub(super) fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "The server failed on this request", None, None)
    }

    /// The error object, as it also goes into a stream that has begun.
    pub(super) fn to_json(&self) -> Value {
        let kind = if self.status.is_client_error() { "invalid_request_error" } else { "server_error" };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let status = match error {
            Error::Invalid(_) => StatusCode::BAD_REQUEST,
            Error::Stopped(_) | Error::Resources(_) => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string(), None, None)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.to_json())).into_response()
    }
}

//! Refusals in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::Error;

/// An HTTP status and OpenAI's error object.
#[derive(Clone, Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    retry_after: Option<u64>, // seconds
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>, param: Option<&str>, code: Option<&'static str>) -> Self {
        Self { status, message: message.into(), param: param.map(String::from), code, retry_after: None }
    }

    /// The request cannot be parsed.
    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message, None, None)
    }

    /// The body did not arrive whole.
    pub(super) fn body(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, message, None, None)
    }

    /// The body exceeds the limit.
    pub(super) fn body_too_large(limit: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("The request body is too large: the limit is {limit} bytes"),
            None,
            None,
        )
    }

    /// A field has the wrong type or a value out of range.
    pub(super) fn bad_field(param: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message, Some(param), Some("invalid_value"))
    }

    /// An error that a field caused. An invalid request is blamed on the field.
    pub(super) fn of_field(param: &str, error: Error) -> Self {
        match error {
            Error::Invalid(message) => Self::bad_field(param, message),
            error => error.into(),
        }
    }

    /// A known field that this server does not support.
    pub(super) fn unsupported(param: &str) -> Self {
        Self::new(
            StatusCode::BAD_REQUEST,
            format!("'{param}' is not supported by this server"),
            Some(param),
            Some("unsupported_parameter"),
        )
    }

    /// A part of a message that is not text, such as an image.
    pub(super) fn not_text(place: &str, kind: &str) -> Self {
        let message = format!("{place} has a part of type '{kind}': this server reads text alone");
        Self::new(StatusCode::BAD_REQUEST, message, Some(place), Some("unsupported_parameter"))
    }

    /// An unknown field.
    pub(super) fn unknown_field(param: &str) -> Self {
        Self::new(
            StatusCode::BAD_REQUEST,
            format!("Unrecognized request argument supplied: {param}"),
            Some(param),
            Some("unknown_parameter"),
        )
    }

    /// The API key is missing or wrong.
    pub(super) fn wrong_key() -> Self {
        let message = "This server requires an API key ('Authorization: Bearer KEY'): the key is missing or wrong";
        Self::new(StatusCode::UNAUTHORIZED, message, None, Some("invalid_api_key"))
    }

    /// The client may not use this server.
    pub(super) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, message, None, Some("forbidden"))
    }

    /// The server cannot answer now. `retry_after`: seconds until a retry makes sense.
    pub(super) fn unavailable(message: &str, retry_after: Option<u64>) -> Self {
        Self { retry_after, ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message, None, Some("unavailable")) }
    }

    /// Too many requests at the same time.
    pub(super) fn too_many(what: impl Into<String>) -> Self {
        let refused = Self::new(StatusCode::TOO_MANY_REQUESTS, what, None, Some("rate_limit_exceeded"));
        Self { retry_after: Some(2), ..refused }
    }

    /// The client took too long to send its request.
    pub(super) fn too_slow() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "The request body did not arrive in time", None, Some("timeout"))
    }

    pub(super) fn no_such_model(asked: &str, served: &str) -> Self {
        let message = format!("The model '{asked}' does not exist; this server serves '{served}'");
        Self::new(StatusCode::NOT_FOUND, message, Some("model"), Some("model_not_found"))
    }

    pub(super) fn no_such_vector(name: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("There is no vector '{name}'"), None, Some("vector_not_found"))
    }

    pub(super) fn no_such_route(path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("There is nothing at {path}"), None, Some("unknown_url"))
    }

    pub(super) fn wrong_method(method: &Method, path: &str) -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            format!("{path} does not accept {method}"),
            None,
            Some("method_not_allowed"),
        )
    }

    /// The prompt leaves no room for an answer.
    pub(super) fn context_length(message: String, param: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message, Some(param), Some("context_length_exceeded"))
    }

    /// A bug of the server.
    pub(super) fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "The server failed on this request", None, None)
    }

    /// The error object, also for a stream that has begun.
    pub(super) fn to_json(&self) -> Value {
        let kind = if self.status.is_client_error() { "invalid_request_error" } else { "server_error" };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }

    /// The same in Anthropic's format.
    pub(super) fn to_anthropic_json(&self, request_id: &str) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            status if status < 500 => "invalid_request_error",
            _ => "api_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id})
    }

    /// A response in Anthropic's format.
    pub(super) fn to_anthropic(&self, request_id: &str) -> Response {
        self.respond(self.to_anthropic_json(request_id))
    }

    fn respond(&self, body: Value) -> Response {
        let mut response = (self.status, Json(body)).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let status = match error {
            Error::Invalid(_) => StatusCode::BAD_REQUEST,
            Error::Busy(what) => return Self::too_many(what),
            Error::Stopped(_) | Error::Resources(_) => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string(), None, None)
    }
}

/// The error without HTTP.
impl From<ApiError> for Error {
    fn from(error: ApiError) -> Self {
        match error.status.is_client_error() {
            true => Error::Invalid(error.message),
            false => Error::Model(error.message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.respond(self.to_json());
        // For the middleware, which may have to send it in another format.
        response.extensions_mut().insert(self);
        response
    }
}

//! The chat page at `/`: plain files in the binary, with headers that make untrusted text harmless.
//!
//! The files are in `web/`; `index.html` describes them. `web/vendor/` has libraries by others, written by
//! `scripts/vendor-web`.

use std::collections::HashMap;
use std::sync::LazyLock;

use axum::Router;
use axum::extract::Path;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, HeaderMap, IF_NONE_MATCH, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use xxhash_rust::xxh3::xxh3_64;

use super::error::ApiError;

/// Only the server's own files and API. No inline script or style, and no string becomes markup or code.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

macro_rules! files {
    ($($name:literal)*) => { [$(($name, include_bytes!(concat!("web/", $name)))),*] };
}

/// Name and content of every file.
const FILES: &[(&str, &[u8])] = &files! {
    "index.html" "style.css" "messages.css" "favicon.svg" "theme.js" "app.js" "answers.js" "api.js" "composer.js"
    "connection.js" "conversation.js" "dom.js" "highlight.js" "link.js" "markdown.js" "math.js" "messages.js"
    "notices.js" "settings.js" "sidebar.js" "store.js"
    "vendor/LICENSES" "vendor/highlight.js" "vendor/katex.css" "vendor/katex.js" "vendor/markdown-it.js"
    "vendor/fonts/KaTeX_AMS-Regular.woff2" "vendor/fonts/KaTeX_Caligraphic-Bold.woff2"
    "vendor/fonts/KaTeX_Caligraphic-Regular.woff2" "vendor/fonts/KaTeX_Fraktur-Bold.woff2"
    "vendor/fonts/KaTeX_Fraktur-Regular.woff2" "vendor/fonts/KaTeX_Main-Bold.woff2"
    "vendor/fonts/KaTeX_Main-BoldItalic.woff2" "vendor/fonts/KaTeX_Main-Italic.woff2"
    "vendor/fonts/KaTeX_Main-Regular.woff2" "vendor/fonts/KaTeX_Math-BoldItalic.woff2"
    "vendor/fonts/KaTeX_Math-Italic.woff2" "vendor/fonts/KaTeX_SansSerif-Bold.woff2"
    "vendor/fonts/KaTeX_SansSerif-Italic.woff2" "vendor/fonts/KaTeX_SansSerif-Regular.woff2"
    "vendor/fonts/KaTeX_Script-Regular.woff2" "vendor/fonts/KaTeX_Size1-Regular.woff2"
    "vendor/fonts/KaTeX_Size2-Regular.woff2" "vendor/fonts/KaTeX_Size3-Regular.woff2"
    "vendor/fonts/KaTeX_Size4-Regular.woff2" "vendor/fonts/KaTeX_Typewriter-Regular.woff2"
};

struct File {
    content: &'static [u8],
    kind: &'static str, // content type
    etag: String,
}

static BY_NAME: LazyLock<HashMap<&str, File>> = LazyLock::new(|| {
    let file = |&(name, content): &(&'static str, &'static [u8])| {
        let kind = match name.rsplit('.').next() {
            Some("html") => "text/html; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            Some("js") => "text/javascript; charset=utf-8",
            Some("svg") => "image/svg+xml",
            Some("woff2") => "font/woff2",
            _ => "text/plain; charset=utf-8",
        };
        (name, File { content, kind, etag: format!("\"{:016x}\"", xxh3_64(content)) })
    };
    FILES.iter().map(file).collect()
});

/// `/`, `/favicon.svg` and `/web/{file}`.
pub(super) fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new()
        .route("/", get(async |headers: HeaderMap| answer(&BY_NAME["index.html"], &headers)))
        .route("/favicon.svg", get(async |headers: HeaderMap| answer(&BY_NAME["favicon.svg"], &headers)))
        .route("/web/{*name}", get(file))
}

async fn file(Path(name): Path<String>, uri: Uri, headers: HeaderMap) -> Response {
    match BY_NAME.get(name.as_str()) {
        Some(file) => answer(file, &headers),
        None => ApiError::no_such_route(uri.path()).into_response(),
    }
}

/// Browsers cache the files and revalidate them each time, so that a new server never meets an old page.
fn answer(file: &File, request: &HeaderMap) -> Response {
    let headers = [
        (ETAG, file.etag.as_str()),
        (CACHE_CONTROL, "no-cache"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
    ];
    if is_known(request, &file.etag) {
        return (StatusCode::NOT_MODIFIED, headers).into_response();
    }
    (headers, [(CONTENT_TYPE, file.kind)], file.content).into_response()
}

fn is_known(request: &HeaderMap, etag: &str) -> bool {
    let tags =
        request.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok()).flat_map(|list| list.split(','));
    tags.map(str::trim).any(|tag| tag == "*" || tag.strip_prefix("W/").unwrap_or(tag) == etag)
}

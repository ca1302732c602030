//! `/metrics`: counters of the engine and the server in Prometheus format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use super::App;
use crate::engine::RequestStats;

/// Counters of the server.
#[derive(Default)]
pub(super) struct HttpMetrics {
    responses: Mutex<BTreeMap<(String, u16), u64>>, // by route and status
    first_token: Histogram<12>,
    per_token: Histogram<12>,
    request: Histogram<12>,
}

impl HttpMetrics {
    /// Counts a response.
    pub(super) fn count(&self, route: &str, status: u16) {
        let mut responses = self.responses.lock().unwrap_or_else(PoisonError::into_inner);
        *responses.entry((route.to_string(), status)).or_default() += 1;
    }

    /// Records the end of an answer.
    pub(super) fn observe(&self, stats: &RequestStats) {
        if stats.completion_tokens > 0 {
            self.first_token.observe(stats.queued + stats.prefill);
        }
        if stats.completion_tokens > 1 {
            self.per_token.observe(stats.decode / (stats.completion_tokens as u32 - 1));
        }
        self.request.observe(stats.queued + stats.prefill + stats.decode);
    }
}

/// Counts of durations up to `FIRST`, twice that, four times that and so on.
struct Histogram<const N: usize> {
    buckets: [AtomicU64; N],
    microseconds: AtomicU64,
    all: AtomicU64,
}

/// Upper end of the first bucket, in seconds.
const FIRST: f64 = 0.005;

impl<const N: usize> Default for Histogram<N> {
    fn default() -> Self {
        Self {
            buckets: std::array::from_fn(|_| AtomicU64::new(0)),
            microseconds: AtomicU64::new(0),
            all: AtomicU64::new(0),
        }
    }
}

impl<const N: usize> Histogram<N> {
    fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        if let Some(bucket) = (0..N).find(|&i| seconds <= FIRST * f64::from(1 << i)) {
            self.buckets[bucket].fetch_add(1, Relaxed);
        }
        self.microseconds.fetch_add(time.as_micros() as u64, Relaxed);
        self.all.fetch_add(1, Relaxed);
    }

    fn write(&self, name: &str, help: &str, out: &mut String) {
        let _ = writeln!(out, "# HELP moebius_{name} {help}\n# TYPE moebius_{name} histogram");
        let mut below = 0;
        for (i, bucket) in self.buckets.iter().enumerate() {
            below += bucket.load(Relaxed);
            let _ = writeln!(out, "moebius_{name}_bucket{{le=\"{}\"}} {below}", FIRST * f64::from(1 << i));
        }
        let all = self.all.load(Relaxed);
        let _ = writeln!(out, "moebius_{name}_bucket{{le=\"+Inf\"}} {all}");
        let _ = writeln!(
            out,
            "moebius_{name}_sum {}\nmoebius_{name}_count {all}",
            self.microseconds.load(Relaxed) as f64 / 1e6
        );
    }
}

/// Answers `/metrics`.
pub(super) async fn show(State(app): State<Arc<App>>) -> Response {
    let mut out = String::new();
    if let Some(model) = app.model.get() {
        for (name, help, kind, value) in model.engine().metrics().all() {
            let _ = writeln!(out, "# HELP moebius_{name}{help}\n# TYPE moebius_{name} {kind}\nmoebius_{name} {value}");
        }
    }
    let (connections, ended) = app.places.count();
    let _ = writeln!(
        out,
        "# HELP moebius_connections Open connections.\n# TYPE moebius_connections gauge\nmoebius_connections \
         {connections}"
    );
    let _ =
        writeln!(out, "# HELP moebius_connections_ended_total Connections that were closed to make room for others.");
    let _ = writeln!(out, "# TYPE moebius_connections_ended_total counter\nmoebius_connections_ended_total {ended}");
    let http = &app.http;
    http.first_token.write("time_to_first_token_seconds", "From submission to the first token.", &mut out);
    http.per_token.write("time_per_output_token_seconds", "Mean time between two tokens of an answer.", &mut out);
    http.request.write("request_seconds", "From submission to the last token.", &mut out);
    let _ = writeln!(
        out,
        "# HELP moebius_http_responses_total Responses by route and status.\n# TYPE moebius_http_responses_total \
         counter"
    );
    for ((route, status), n) in &*http.responses.lock().unwrap_or_else(PoisonError::into_inner) {
        let _ = writeln!(out, "moebius_http_responses_total{{route=\"{route}\",status=\"{status}\"}} {n}");
    }
    let _ = writeln!(
        out,
        "# HELP moebius_log_lines_dropped_total Lines of stderr and of the log that were dropped.\n# TYPE \
         moebius_log_lines_dropped_total counter\nmoebius_log_lines_dropped_total {}",
        crate::log::dropped_lines()
    );
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], out).into_response()
}

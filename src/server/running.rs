//! A server from its start to its end: the model when it is there, signals, and the time to drain.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::App;
use crate::text::model::TextModel;
use crate::{Error, Result};

/// A server that answers requests.
pub struct Running {
    pub(super) runtime: Runtime,
    pub(super) app: Arc<App>,
    pub(super) stop: watch::Sender<bool>,
    pub(super) done: JoinHandle<()>,
    pub(super) drain: Duration,
}

impl Running {
    /// From now on requests are answered with `model`.
    pub fn set_model(&self, model: TextModel) {
        let _ = self.app.model.set(model);
    }

    /// Calls `act` at each SIGHUP, which no longer ends the process. Errors: `Error::Resources`.
    pub fn on_hangup(&self, mut act: impl FnMut() + Send + 'static) -> Result<()> {
        use tokio::signal::unix::{SignalKind, signal};
        let _context = self.runtime.enter();
        let mut hangups =
            signal(SignalKind::hangup()).map_err(|e| Error::Resources(format!("cannot watch for SIGHUP: {e}")))?;
        self.runtime.spawn(async move {
            while hangups.recv().await.is_some() {
                act();
            }
        });
        Ok(())
    }

    /// Answers until Ctrl-C or SIGTERM; then running answers may end, until a second signal or the time to drain has
    /// passed.
    pub fn wait(self) {
        let signals = async {
            signal().await;
            tracing::info!("stopping: running answers may end");
            Some(signal())
        };
        self.wait_until(signals);
    }

    /// As [`wait`](Running::wait), until `stop` ends; what it gives ends the wait for running answers.
    pub fn wait_until<F: Future<Output = ()>>(self, stop: impl Future<Output = Option<F>>) {
        let Self { runtime, app, stop: stopping, mut done, drain } = self;
        runtime.block_on(async {
            let again = tokio::select! {
                _ = &mut done => return,
                again = stop => again,
            };
            app.draining.store(true, Relaxed);
            let _ = stopping.send(true);
            let impatient = async {
                match again {
                    Some(again) => again.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = done => {}
                () = impatient => {}
                () = tokio::time::sleep(drain) => {}
            }
        });
        // Tokenizing may still run on another thread, whose end is not waited for.
        runtime.shutdown_background();
    }
}

async fn signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let terminate = async {
        match signal(SignalKind::terminate()) {
            Ok(mut signal) => drop(signal.recv().await),
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        () = terminate => {}
    }
}

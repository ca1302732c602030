//! The chat page in headless Chromium, against the real server: its own files, its own headers, over a socket.
//!
//! Where there is no chromedriver (Debian: chromium-driver), tests that need it are skipped by name.
// Helpers of tests are outside #[test] functions, and nothing imports a test.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod browser;
mod chat;
mod fake;
mod files;
mod look;
mod prose;

/// A browser, or the end of the test.
macro_rules! open {
    ($server:expr) => {
        open!($server, crate::browser::Screen::Desk)
    };
    ($server:expr, $screen:expr) => {
        match crate::browser::Browser::open(&$server.url(), $screen) {
            Some(browser) => browser,
            None => return,
        }
    };
}
pub(crate) use open;

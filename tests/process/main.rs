//! The command as a process: its signals, pipes, limits and files, when others treat them badly.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod child;
#[path = "../common/mod.rs"]
mod common;
mod cut;
mod hangup;
mod limits;
mod places;
mod reader;

//! The server over a real socket: bytes in, bytes out, with an engine that says what the test tells it to.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

mod apart;
mod chat;
#[path = "../common/mod.rs"]
mod common;
mod engine;
mod fixture;
mod group;
mod memory;
mod messages;
mod places;
mod refusals;
mod requests;
mod steer;
mod stopping;
mod trust;

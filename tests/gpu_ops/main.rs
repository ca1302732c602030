//! Every op of `Backend` on the GPU against the CPU's, on random ragged batches: odd widths, single rows and ends of
//! tiles included.
//!
//! Inputs are numbers that bf16 holds, so that both sides compute with the same ones. What the GPU rounds on the way
//! says how far it may be off.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod compress;
mod delta_net;
mod kda;
mod latents;
mod library;
mod mamba2;
mod products;
mod routing;
mod rows;
mod select;
mod steps;
mod streams;

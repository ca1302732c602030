//! The machine: what there is of it, memory where it belongs, and a team of threads pinned to its cores.
//!
//! ```text
//! topology    cores, NUMA nodes, caches, limits, as /sys and the control group say
//! trial       which of several ways makes steps fastest
//! workers     the pinned team: gate, claims, and who of it rests
//! memory      huge pages on the nodes they belong to, and how fast they are read
//! heap        hands out memory and counts it, or only counts
//! ```
//!
//! Imports no other room. Read `workers` first.

pub mod heap;
pub mod memory;
pub mod topology;
pub mod trial;
pub mod workers;

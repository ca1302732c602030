//! The machine: what there is of it, memory on its NUMA nodes, and a team of threads pinned to its cores.
//!
//! ```text
//! topology    cores, nodes, caches, limits, as /sys and the control group say
//! workers     the pinned team, and who of it rests
//! memory      huge pages on the nodes where they belong
//! ```

pub mod memory;
pub mod topology;
pub mod workers;

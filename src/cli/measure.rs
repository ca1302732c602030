//! What `moebius bench` and `moebius doctor` measure: an engine, any server under load, this machine.

pub mod bench;
pub mod doctor;

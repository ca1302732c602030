//! The CPU is alone.

use super::Cpu;
use crate::backend::Rank;

impl Rank for Cpu {}

//! The `moebius` command.

fn main() {}

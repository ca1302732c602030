//! Routed experts on the CPU, straight from the packed cache: two phases and one barrier in one dispatch.

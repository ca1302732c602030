//! What `any_tensors.rs` makes of any bytes: tensors under the names of every quantized format.
#![no_main]

mod any_tensors;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| any_tensors::check(bytes));

//! Ids of calls.

use std::hash::{BuildHasher, RandomState};

/// `call_` and 24 random letters and digits.
pub(super) fn call_id() -> String {
    const LETTERS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    let mut id = String::from("call_");
    for _ in 0..2 {
        // The standard library's hash keys are the process's own randomness, different in each state.
        let mut random = RandomState::new().hash_one(&id);
        for _ in 0..12 {
            id.push(char::from(LETTERS[(random % 62) as usize]));
            random /= 62;
        }
    }
    id
}

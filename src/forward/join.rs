//! The one door into the residual stream: what a layer adds to it passes here.
//!
//! On one device a partial result is the whole one, and the product adds to the stream as it writes. Where each rank
//! computes a share, ranks sum here.

use crate::Result;
use crate::backend::Backend;
use crate::experts::ExpertExecutor;

/// What a layer adds to the residual stream: not computed yet, so that the addition may be part of it.
pub(crate) enum Partial<'a, B: Backend> {
    /// `W h[t] + b`
    Product(&'a B::Linear, &'a B::Tensor),
    /// The routed experts of the tokens that were submitted last.
    Experts(&'a mut (dyn ExpertExecutor<B> + 'static)),
}

/// `x += partial`; `x` is the residual stream, `[T, hidden]`.
pub(crate) fn join<B: Backend>(backend: &B, partial: Partial<'_, B>, x: &mut B::Tensor) -> Result<()> {
    match partial {
        Partial::Product(w, h) => {
            backend.linear_add(w, h, x);
            Ok(())
        }
        Partial::Experts(experts) => experts.finish(x),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// A rank could sum only what passes through the door.
    #[test]
    fn nothing_else_adds_to_the_residual_stream() {
        fn files(dir: &Path) -> Vec<std::path::PathBuf> {
            let paths = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
            paths.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
        }
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let room = files(&src.join("forward")).into_iter().chain([src.join("forward.rs")]);
        for file in room.filter(|file| !file.ends_with("join.rs")) {
            let text = std::fs::read_to_string(&file).unwrap();
            for door in [".linear_add(", ".finish("] {
                assert!(!text.contains(door), "{} calls {door}...), which is for join.rs", file.display());
            }
        }
    }
}

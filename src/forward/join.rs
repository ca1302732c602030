//! The one door into the residual streams, of which most models have one: what a layer adds to it passes here.
//!
//! On one device a partial result is the whole one, and the product adds to the stream as it writes. Where each rank
//! computes a share, ranks sum here: the first one adds its part to the stream, the others write theirs over it, and
//! the sum of all is the stream again.

use crate::Result;
use crate::backend::{Backend, NgramInputs};
use crate::experts::ExpertExecutor;
use crate::model::Norm;

/// What a layer adds to the residual stream: not computed yet, so that the addition may be part of it.
pub(crate) enum Partial<'a, B: Backend> {
    /// `W h[t] + b`
    Product(&'a B::Linear, &'a B::Tensor),
    /// What was summed already, `[T, hidden]`, f32; it passes a norm.
    Sum(&'a B::Tensor),
    /// The routed experts of the tokens that were submitted last.
    Experts(&'a mut (dyn ExpertExecutor<B> + 'static)),
    /// What n-grams add to all streams; it passes nothing.
    Ngrams(&'a B::Tensor),
    /// The same, convolved.
    ConvolvedNgrams(&'a mut B::State, &'a B::Batch, NgramInputs<'a, B>),
}

/// The residual stream as one part of a layer sees it: what it reads, and what becomes of its result.
pub(crate) struct Stream<'a, B: Backend> {
    /// `[T, streams * hidden]`, f32.
    pub(super) x: &'a mut B::Tensor,
    /// RMS norm of what the part reads, and its epsilon; `None`: the part's input stands in its buffer `h`.
    pub(super) norm: Option<(&'a B::Norm, f32)>,
    /// What the result goes through before it is added.
    pub(super) after: Option<After<'a, B>>,
    /// Which of its results comes next.
    pub(super) term: Term,
}

/// Which of a part's results it is: ranks sum once for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Term {
    Only,
    First,
    Last,
    /// Every rank has all of it, and none sums.
    Whole,
}

/// What a result goes through, and where it stands until then.
pub(super) struct After<'a, B: Backend> {
    pub(super) through: Through<'a, B>,
    pub(super) result: &'a mut B::Tensor, // [T, hidden], f32
}

/// What a result goes through.
pub(super) enum Through<'a, B: Backend> {
    /// `x = (x + norm(result)) * scale`
    Norm((&'a B::Norm, f32), f32),
    /// `x_s += share_s * result` for every stream; shares `[T, streams]`, f32.
    Shares(&'a B::Tensor),
    /// `x_k = post_k * result + sum over j of C_jk x_j`, as [`Connections`](crate::model::Connections) say; `pre`,
    /// `post` and `C` are `[T, rows]`, f32.
    Connected(&'a B::Tensor),
}

impl<B: Backend> Through<'_, B> {
    fn add(&self, backend: &B, result: &B::Tensor, x: &mut B::Tensor) {
        match self {
            Through::Norm(norm, scale) => backend.norm_add(result, *norm, *scale, x),
            Through::Shares(shares) => backend.inject(result, shares, x),
            Through::Connected(shares) => backend.connect_streams(result, shares, x),
        }
    }
}

impl<'a, B: Backend> Stream<'a, B> {
    /// One that a result is added to as it is.
    pub(super) fn plain(x: &'a mut B::Tensor) -> Self {
        Self { x, norm: None, after: None, term: Term::Only }
    }

    /// The same, for one of a part's results.
    pub(super) fn of_term(x: &'a mut B::Tensor, term: Term) -> Self {
        Self { term, ..Self::plain(x) }
    }

    /// Products of what the part reads. `h` has room for it, and a device may leave it unwritten.
    pub(super) fn linears<const N: usize>(
        &self,
        backend: &B,
        h: &mut B::Tensor,
        jobs: [(&B::Linear, &mut B::Tensor); N],
    ) {
        match self.norm {
            Some(norm) => backend.norm_linears(self.x, norm, h, jobs),
            None => backend.linears(h, jobs),
        }
    }

    /// The part that comes next reads `norm` of the stream. RMS norm may be left to its products; layer norm fills `h`.
    pub(super) fn enter(&mut self, backend: &B, kind: Norm, (norm, eps): (&'a B::Norm, f32), h: &mut B::Tensor) {
        self.norm = match kind {
            Norm::Rms => Some((norm, eps)),
            Norm::Layer => {
                backend.layer_norm(self.x, norm, eps, h);
                None
            }
        };
    }

    /// Puts what the part reads into `h`, where it stays.
    pub(super) fn settle(&mut self, backend: &B, h: &mut B::Tensor) {
        self.read(backend, h);
        self.norm = None;
    }

    /// Puts what the part reads into `h`.
    pub(super) fn read(&self, backend: &B, h: &mut B::Tensor) {
        if let Some((norm, eps)) = self.norm {
            backend.rms_norm(self.x, norm, eps, h);
        }
    }
}

/// Adds a part's result to the residual stream.
pub(crate) fn join<B: Backend>(backend: &B, partial: Partial<'_, B>, stream: &mut Stream<'_, B>) -> Result<()> {
    let Stream { x, after, term, .. } = stream;
    // Other ranks' terms stand in the place of what they add to, which the first rank has.
    let is_over = backend.share().rank > 0 && matches!(term, Term::Only | Term::First);
    backend.wait_for_sum(x);
    let sums = matches!(term, Term::Only | Term::Last);
    let sum = |x: &mut B::Tensor, is_summed: bool| {
        if !is_summed {
            backend.all_reduce(x);
        }
    };
    match (partial, after) {
        (Partial::Product(w, h), None) if sums => {
            let is_summed = backend.linear_of_rank(w, h, x, is_over);
            sum(x, is_summed);
        }
        (Partial::Product(w, h), None) if is_over => backend.linear(w, h, x),
        (Partial::Product(w, h), None) => backend.linear_add(w, h, x),
        (Partial::Product(w, h), Some(After { through, result })) => {
            match term {
                Term::Whole => backend.linear(w, h, result),
                _ => {
                    let is_summed = backend.linear_of_rank(w, h, result, true);
                    sum(result, is_summed);
                }
            }
            backend.wait_for_sum(result);
            through.add(backend, result, x);
        }
        (Partial::Sum(sum), Some(After { through, .. })) => {
            backend.wait_for_sum(sum);
            through.add(backend, sum, x);
        }
        (Partial::Sum(_), None) => panic!("a sum passes a norm"),
        (Partial::Experts(experts), None) if sums => {
            let is_summed = experts.finish_of_rank(backend, x, is_over)?;
            sum(x, is_summed);
        }
        (Partial::Experts(experts), None) => {
            if is_over {
                backend.clear(x);
            }
            experts.finish(x)?;
        }
        (Partial::Experts(experts), Some(After { through, result })) => {
            let is_summed = experts.finish_of_rank(backend, result, true)?;
            sum(result, is_summed);
            backend.wait_for_sum(result);
            through.add(backend, result, x);
        }
        (Partial::Ngrams(u), _) => backend.add_ngrams(u, x),
        (Partial::ConvolvedNgrams(state, batch, inputs), _) => backend.convolve_ngrams(state, batch, &inputs, x),
    }
    Ok(())
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
            for door in [
                ".linear_add(",
                ".linear_of_rank(",
                ".finish(",
                ".finish_of_rank(",
                ".norm_add(",
                ".inject(",
                ".connect_streams(",
                ".convolve_ngrams(",
                ".add_ngrams(",
            ] {
                assert!(!text.contains(door), "{} calls {door}...), which is for join.rs", file.display());
            }
        }
    }
}

//! What queries and keys go through between their products and attention: norms, rotations, and the way into the cache.

use std::ops::Range;

use super::kv::Kv;
use super::{Cpu, Scratch, lock};
use crate::backend::batch::{BLOCK_SIZE, Batch};
use crate::backend::tensor::Tensor;
use crate::backend::{Heads, Rotary};
use crate::kernel::Kernel;
use crate::machine::workers::Shared;

/// Numbers of queries and keys from which on all workers prepare them. Few: they lie in the caches of the cores that
/// computed them, which one thread alone would wait for one after the other.
const PARALLEL: usize = 1 << 11;

/// What each head of a tensor goes through.
pub(super) struct Preparation<'a> {
    dim: usize,
    norm: Option<(&'a Vec<f32>, usize, f32)>,
    rotary: Option<&'a Rotary<'a, Cpu>>,
    rope_at: usize,
}

impl<'a> Preparation<'a> {
    pub(super) fn of(heads: &Heads<'a, Cpu>, rotary: Option<&'a Rotary<'a, Cpu>>) -> Self {
        Self { dim: heads.dim, norm: heads.norm, rotary, rope_at: heads.rope_at }
    }

    /// Keys that are prepared already.
    pub(super) fn none(dim: usize) -> Self {
        Self { dim, norm: None, rotary: None, rope_at: 0 }
    }

    pub(super) fn is_nothing(&self) -> bool {
        self.norm.is_none() && self.rotary.is_none()
    }

    /// `out` becomes the head `x` of token `t`, both `[dim]`.
    fn head(&self, kernel: &dyn Kernel, t: usize, x: &[f32], out: &mut [f32]) {
        let mut normed = 0;
        if let Some((norm, width, eps)) = self.norm {
            kernel.rms_norm(&x[..width], norm, eps, &mut out[..width]);
            normed = width;
        }
        out[normed..].copy_from_slice(&x[normed..]);
        if let Some(rotary) = self.rotary {
            turn(&mut out[self.rope_at..], rotary, t, forward);
        }
    }
}

/// Rotates the first numbers of `x` by the angles of token `t`; `pair` does a pair.
pub(super) fn turn(
    x: &mut [f32],
    &Rotary { angles, interleaved }: &Rotary<'_, Cpu>,
    t: usize,
    pair: impl Fn(&mut f32, &mut f32, f32, f32),
) {
    let half = angles.cols() / 2;
    let (cos, sin) = angles.row(t).split_at(half);
    let x = &mut x[..2 * half];
    if interleaved {
        for ([a, b], (cos, sin)) in x.as_chunks_mut::<2>().0.iter_mut().zip(cos.iter().zip(sin)) {
            pair(a, b, *cos, *sin);
        }
    } else {
        let (first, second) = x.split_at_mut(half);
        for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
            pair(a, b, *cos, *sin);
        }
    }
}

/// Turns a pair by an angle.
pub(super) fn forward(a: &mut f32, b: &mut f32, cos: f32, sin: f32) {
    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
}

/// Turns a pair the other way.
pub(super) fn back(a: &mut f32, b: &mut f32, cos: f32, sin: f32) {
    (*a, *b) = (*a * cos + *b * sin, *b * cos - *a * sin);
}

impl Cpu {
    /// Prepares queries and keys and stores keys and values, in one dispatch if there is much to do.
    pub(super) fn prepare_and_store(
        &self,
        kv: &mut Kv,
        batch: &Batch,
        queries: Option<(&mut Tensor, Preparation<'_>)>,
        (keys, of_keys): (&Tensor, Preparation<'_>),
        values: Option<&Tensor>,
    ) {
        let (heads, dim, value_dim, kernel) = (kv.heads, kv.keys.layout.k, kv.values.layout.n, self.kernel);
        assert!(of_keys.dim == dim && keys.cols() == heads * dim);
        let numbers = queries.iter().map(|(q, _)| q.data().len()).sum::<usize>() + keys.data().len();
        let queries = queries.map(|(q, of)| (q.cols() / of.dim, Shared::new(q.data_mut()), of));
        let query_heads = queries.as_ref().map_or(0, |(_, q, of)| q.len() / of.dim);
        let to = kv.writer();
        let prepare = |mine: Range<usize>, Scratch { values: room, .. }: &mut Scratch| {
            let Some((heads, q, of_queries)) = &queries else { return };
            let (dim, room) = (of_queries.dim, room.take(of_queries.dim));
            for i in mine {
                // SAFETY: a head is in one worker's share.
                #[allow(unsafe_code)]
                let x = unsafe { q.slice_mut(i * dim..(i + 1) * dim) };
                of_queries.head(kernel, i / heads, x, room);
                x.copy_from_slice(room);
            }
        };
        // One worker stores all positions of a block and head: neighbours share words.
        let store = |worker: usize, workers: usize, Scratch { values: room, row, .. }: &mut Scratch| {
            let room = room.take(dim);
            let runs = batch.spans.iter().flat_map(|span| span.by_block().map(move |positions| (span, positions)));
            let runs = runs.flat_map(|(span, positions)| (0..heads).map(move |h| (span, positions.clone(), h)));
            for (span, positions, h) in runs.skip(worker).step_by(workers) {
                for position in positions {
                    let (t, slot) = (span.rows.start + position - span.start, batch.slot(span, position));
                    of_keys.head(kernel, t, &keys.row(t)[h * dim..][..dim], room);
                    let value = values.map(|values| &values.row(t)[h * value_dim..][..value_dim]);
                    // SAFETY: a block belongs to one sequence, and each of its heads to one worker.
                    #[allow(unsafe_code)]
                    unsafe {
                        to.put(slot / BLOCK_SIZE * heads + h, slot % BLOCK_SIZE, (room, value), row);
                    }
                }
            }
        };
        if numbers < PARALLEL {
            let scratch = &mut lock(&self.scratch[0]);
            prepare(0..query_heads, scratch);
            return store(0, 1, scratch);
        }
        let scratch = &self.scratch;
        self.team.run(&|worker| {
            let scratch = &mut lock(&scratch[worker.index]);
            prepare(worker.share(query_heads), scratch);
            store(worker.index, worker.count, scratch);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::{Attend, Dense};
    use crate::config::KvBits;
    use crate::kernel::random::Random;
    use crate::machine::topology::Topology;
    use crate::machine::workers::Team;
    use crate::model::Values;

    /// Where sequences' tokens begin, and how many they are.
    const BATCHES: &[&[(usize, usize)]] = &[&[(5, 1)], &[(0, 200), (63, 2), (130, 1)], &[(64, 64), (0, 1), (1, 63)]];

    /// Heads of queries or keys: their number, their width, how much of it a norm covers, and what is rotated first.
    type Form = (usize, usize, Option<usize>, usize);

    fn random(rows: usize, cols: usize, seed: u64) -> Tensor {
        let (mut random, mut x) = (Random(seed), Tensor::new(rows, cols));
        x.data_mut().iter_mut().for_each(|x| *x = random.uniform() as f32 - 0.5);
        x
    }

    /// The queries, and all bytes of the cache. `at_once`: by one op, not by one after the other.
    fn prepared(
        (threads, at_once): (usize, bool),
        (forms, values, is_turned, bits): ([Form; 2], Values, bool, KvBits),
        (batch, blocks): (&Batch, usize),
    ) -> (Vec<f32>, Vec<u8>) {
        let team = Team::new(&Topology::read().worker_cpus(threads)).unwrap();
        let cpu = Cpu::new(Arc::new(team), crate::kernel::best());
        let [(q_heads, q_dim, q_normed, q_rope_at), (k_heads, k_dim, k_normed, k_rope_at)] = forms;
        let mut kv = cpu.kv(blocks, (k_heads, k_dim, values), bits).unwrap();
        let mut angles = Tensor::new(batch.len(), 16);
        cpu.rope_angles(&(0..8).map(|i| 0.7f32.powi(i)).collect(), 1.2, batch, &mut angles);
        let rotary = is_turned.then_some(Rotary { angles: &angles, interleaved: bits == KvBits::Int8 });
        let [mut q, mut k] = [(q_heads * q_dim, 1), (k_heads * k_dim, 2)].map(|(n, seed)| random(batch.len(), n, seed));
        let v = matches!(values, Values::Own(_)).then(|| random(batch.len(), k_heads * values.dim(), 3));
        let norms = [q_normed, k_normed].map(|width| random(1, width.unwrap_or(0), 4).data().to_vec());
        if at_once {
            let norm = |i: usize, width: Option<usize>| width.map(|width| (&norms[i], width, 1e-6));
            let q = Heads { x: &mut q, heads: q_heads, dim: q_dim, norm: norm(0, q_normed), rope_at: q_rope_at };
            let k = Heads { x: &mut k, heads: k_heads, dim: k_dim, norm: norm(1, k_normed), rope_at: k_rope_at };
            cpu.prepare_heads(&mut kv, batch, rotary.as_ref(), q, k, v.as_ref());
        } else {
            for ((x, norm), (heads, dim, normed, rope_at)) in
                [(&mut q, &norms[0]), (&mut k, &norms[1])].into_iter().zip(forms)
            {
                if let Some(width) = normed {
                    cpu.rms_norm_heads(x, norm, 1e-6, 0..heads * width);
                }
                if let Some(rotary) = &rotary {
                    cpu.rope(x, dim, rope_at, rotary);
                }
            }
            cpu.kv_write(&mut kv, batch, &k, v.as_ref());
        }
        let len = cpu.kv_block_bytes(&kv);
        let mut bytes = vec![0; blocks * len];
        bytes.chunks_exact_mut(len).enumerate().for_each(|(i, to)| cpu.kv_to_host(&kv, i, to));
        (q.data().to_vec(), bytes)
    }

    #[test]
    fn one_op_has_the_bits_of_one_after_the_other() {
        let grouped = |normed: Option<usize>| ([(6, 48, normed, 8), (2, 48, normed, 8)], Values::Own(40));
        let latent = ([(4, 48, None, 32), (1, 80, Some(64), 64)], Values::OfKeys(64));
        let cases = [
            (grouped(Some(48)), true, KvBits::Bf16),
            (grouped(Some(48)), false, KvBits::Bf16x2),
            (grouped(None), true, KvBits::Int8),
            (grouped(None), false, KvBits::Bf16),
            (latent, true, KvBits::Bf16),
            (latent, true, KvBits::Int8),
        ];
        for sequences in BATCHES {
            let (mut batch, mut blocks) = (Batch::default(), 0);
            for &(start, tokens) in *sequences {
                let first = blocks;
                blocks += (start + tokens).div_ceil(BLOCK_SIZE) as u32;
                batch.push(&vec![1; tokens], start, &(first..blocks).rev().collect::<Vec<_>>());
            }
            for ((forms, values), is_turned, bits) in cases {
                let run = |threads, at_once| {
                    prepared((threads, at_once), (forms, values, is_turned, bits), (&batch, blocks as usize))
                };
                let want = run(1, false);
                assert!(want.1.iter().any(|&byte| byte != 0));
                for threads in [1, 2, 5] {
                    assert!(run(threads, true) == want, "{forms:?} on {threads} threads, {bits}, {sequences:?}");
                }
            }
        }
    }
}

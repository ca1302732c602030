//! Choosing positions: every key that a token sees is scored in f32, and the best are taken.
//!
//! ```text
//! for each wave of tokens that see more than they may attend to:
//!   score[t, s] of every key s, as `Score` says           tokens and blocks of 64 positions, spread over the workers
//!   chosen[t] = positions of the best units, ascending    tokens, spread over the workers
//! ```
//!
//! A score is a function of one query and one key, so the choice depends on nothing else in the batch.

use std::cmp::Ordering;

use super::{Cpu, Numbers, Scratch, lock};
use crate::Result;
use crate::backend::batch::{BLOCK_SIZE, Batch, Span};
use crate::backend::tensor::Tensor;
use crate::backend::{IndexQueries, KeyNorm, KeyPool, Rotary, Select};
use crate::kernel::{Kernel, Rows};
use crate::machine::memory::Buffer;
use crate::machine::workers::Shared;
use crate::model::{self, ChosenBy, Indexer, Score};

/// Index keys of one layer.
pub struct Index {
    keys: Buffer<f32>,        // [blocks, keys of a block, dim]
    raw: Option<Buffer<f32>>, // [blocks, 64, of a position]: what units' keys are made of
    of_raw: usize,            // a key, and its gate where there are some
    dim: usize,
    keys_of_block: usize,
}

impl Index {
    /// The key of a unit, by its number in the storage.
    pub(super) fn key_mut(&mut self, unit: usize) -> &mut [f32] {
        &mut self.keys[unit * self.dim..][..self.dim]
    }

    /// What it has of blocks, with the bytes of one.
    fn of_blocks(&self) -> impl Iterator<Item = (&Buffer<f32>, usize)> {
        let bytes = |keys: usize| keys * self.dim * size_of::<f32>();
        std::iter::once((&self.keys, bytes(self.keys_of_block)))
            .chain(self.raw.iter().map(|raw| (raw, BLOCK_SIZE * self.of_raw * size_of::<f32>())))
    }
}

/// The positions that each token of a batch attends to.
pub struct Chosen {
    most: usize,         // a token that sees no more sees all of them, and has no list
    sets: usize,         // of a token
    len: usize,          // of a list, at most
    positions: Vec<u32>, // [tokens, sets, len], or numbers of entries; ascending
    counts: Vec<u32>,    // [tokens, sets]
    candidates: Candidates,
}

/// Blocks of units that each token of a batch chooses among, where it sees more.
struct Candidates {
    most: usize,      // of a token; 0: nothing is limited
    blocks: Vec<u32>, // [tokens, most], ascending
}

impl Chosen {
    /// Positions that a token attends to at most.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// What KV head `head` of `heads` of a token attends to; the token sees more than [`most`](Chosen::most).
    pub(super) fn list(&self, token: usize, head: usize, heads: usize) -> &[u32] {
        let set = token * self.sets + head * self.sets / heads;
        &self.positions[set * self.len..][..self.counts[set] as usize]
    }
}

/// A token that attends to a list of positions.
pub(super) struct Listed<'a> {
    pub(super) span: &'a Span,
    pub(super) row: usize,
    pub(super) seen: usize, // positions that it sees
}

/// The tokens of a span that see more than `most` positions.
pub(super) fn listed(span: &Span, most: usize) -> impl ExactSizeIterator<Item = Listed<'_>> {
    let before = most.saturating_sub(span.start).min(span.rows.len());
    let rows = span.rows.start + before..span.rows.end;
    rows.map(move |row| Listed { span, row, seen: span.start + row - span.rows.start + 1 })
}

impl Select for Cpu {
    type Index = Index;
    type SelectScratch = ();

    fn index(&self, blocks: usize, indexer: &Indexer) -> Result<Index> {
        let (dim, keys) = (indexer.head_dim, indexer.keys_of(BLOCK_SIZE));
        // Products of a block, or a mean of keys and angles.
        self.reserve(|scratch, heap| scratch.values.reserve(heap, &[(indexer.num_heads * keys).max(2 * dim)]))?;
        let of_raw = if matches!(indexer.score, Score::Gated { .. }) { 2 * dim } else { dim };
        // A compressor keeps what entries are made of.
        let pools = indexer.pools() && !matches!(indexer.score, Score::Entries { .. });
        let raw = pools.then(|| self.heap.buffer(&[blocks, BLOCK_SIZE, of_raw])).transpose()?;
        Ok(Index { keys: self.heap.buffer(&[blocks, keys, dim])?, raw, of_raw, dim, keys_of_block: keys })
    }

    fn index_block_bytes(&self, index: &Index) -> usize {
        index.of_blocks().map(|(_, bytes)| bytes).sum()
    }

    fn index_to_host(&self, index: &Index, block: usize, mut out: &mut [u8]) {
        for (part, bytes) in index.of_blocks() {
            let (to, rest) = out.split_at_mut(bytes);
            to.copy_from_slice(&bytemuck::cast_slice(part)[block * bytes..][..bytes]);
            out = rest;
        }
    }

    fn index_to_device(&self, index: &mut Index, block: usize, mut from: &[u8]) {
        let all: Vec<usize> = index.of_blocks().map(|(_, bytes)| bytes).collect();
        for (part, bytes) in std::iter::once(&mut index.keys).chain(&mut index.raw).zip(all) {
            let (of_part, rest) = from.split_at(bytes);
            bytemuck::cast_slice_mut(part)[block * bytes..][..bytes].copy_from_slice(of_part);
            from = rest;
        }
    }

    fn chosen(&self, indexer: &Indexer, max_tokens: usize) -> Result<Chosen> {
        let (most, len, sets) = (indexer.most(), indexer.listed(), indexer.sets());
        let (positions, counts) = (self.heap.zeros(&[max_tokens, sets, len])?, self.heap.zeros(&[max_tokens, sets])?);
        let of_token = indexer.candidates.map_or(0, |of| of.blocks);
        let candidates = Candidates { most: of_token, blocks: self.heap.zeros(&[max_tokens, of_token])? };
        Ok(Chosen { most, len, sets, positions, counts, candidates })
    }

    fn select_scratch(&self, _: &Indexer, _: usize) -> Result<()> {
        Ok(())
    }

    fn index_write(
        &self,
        index: &mut Index,
        batch: &Batch,
        indexer: &Indexer,
        (rotary, norm, pool): (Option<&Rotary<'_, Self>>, &KeyNorm<'_, Self>, Option<KeyPool<'_, Self>>),
        keys: &Tensor,
    ) {
        let dim = index.dim;
        let mut scratch = lock(&self.scratch[0]);
        for span in &batch.spans {
            for (t, position) in span.rows.clone().zip(span.start..) {
                let slot = batch.slot(span, position);
                let Some(raw) = &mut index.raw else {
                    let to = &mut index.keys[slot * dim..][..dim];
                    norm.apply(self.kernel, keys.row(t), to);
                    rotary.iter().for_each(|rotary| rotary.turn(t, to));
                    continue;
                };
                if let Some(pool) = &pool {
                    let (key, gate) = raw[slot * 2 * dim..][..2 * dim].split_at_mut(dim);
                    norm.apply(self.kernel, keys.row(t), key);
                    gate.copy_from_slice(pool.gate.row(t));
                    if position % indexer.unit == indexer.unit - 1 {
                        let first = (slot + 1 - indexer.unit) * 2 * dim;
                        let to = &mut index.keys[slot / indexer.unit * dim..][..dim];
                        pool.sum(&raw[first..(slot + 1) * 2 * dim], to);
                    }
                    continue;
                }
                let rotary = rotary.expect("keys whose mean is taken rotate");
                raw[slot * dim..][..dim].copy_from_slice(keys.row(t));
                let (unit, to) = (indexer.unit, &mut index.keys[slot / indexer.unit * dim..][..dim]);
                let angles = rotary.angles.row(t);
                // Until the unit is whole, its key's place holds the angles of its first position.
                if position % unit == 0 {
                    to[..angles.len()].copy_from_slice(angles);
                }
                if position % unit == unit - 1 {
                    let (mean, first_angles) = scratch.values.take(2 * dim).split_at_mut(dim);
                    let first_angles = &mut first_angles[..angles.len()];
                    first_angles.copy_from_slice(&to[..angles.len()]);
                    mean.fill(0.0);
                    for token in raw[(slot + 1 - unit) * dim..(slot + 1) * dim].chunks_exact(dim) {
                        mean.iter_mut().zip(token).for_each(|(mean, x)| *mean += x);
                    }
                    mean.iter_mut().for_each(|mean| *mean /= unit as f32);
                    norm.apply(self.kernel, mean, to);
                    turn(first_angles, rotary.interleaved, to);
                }
            }
        }
    }

    fn select(
        &self,
        index: &Index,
        batch: &Batch,
        indexer: &Indexer,
        queries: &IndexQueries<'_, Self>,
        (): &mut (),
        chosen: &mut Chosen,
    ) {
        let (dim, heads, kernel) = (index.dim, indexer.num_heads, self.kernel);
        chosen.most = indexer.most(); // layers may have other units
        let (most, len, of_token) = (chosen.most, chosen.len, chosen.candidates.most);
        let (sets, in_block) = (chosen.sets, indexer.keys_of(BLOCK_SIZE));
        let choosing = |from: usize| batch.spans.iter().flat_map(|span| listed(span, most)).skip(from);
        let total = choosing(0).count();
        if total == 0 {
            return;
        }
        let blocks = choosing(0).map(|token| token.seen.div_ceil(BLOCK_SIZE)).max().unwrap_or(0);
        let (row, scratch) = (blocks * in_block, &self.scratch); // scores of a set
        let mut memory = self.partial.borrow_mut();
        let wave = self.team.threads().min(total);
        let scores = Shared::new(memory.take(wave * sets * row));
        let (positions, counts) = (Shared::new(&mut chosen.positions), Shared::new(&mut chosen.counts));
        let candidates = Shared::new(&mut chosen.candidates.blocks);
        self.team.run(&|worker| {
            let Scratch { values, scores: work, .. } = &mut *lock(&scratch[worker.index]);
            let products = values.take(heads * in_block);
            for first in (0..total).step_by(wave) {
                let tokens = wave.min(total - first);
                let of_wave = || choosing(first).take(tokens).enumerate();
                let units = worker.share(tokens * blocks);
                for (i, Listed { span, row: t, seen }) in of_wave() {
                    let here = |unit: usize| unit.clamp(i * blocks, (i + 1) * blocks) - i * blocks;
                    for block in here(units.start)..here(units.end).min(seen.div_ceil(BLOCK_SIZE)) {
                        let slot = batch.slot(span, block * BLOCK_SIZE) / BLOCK_SIZE;
                        let keys = &index.keys[slot * in_block * dim..][..in_block * dim];
                        let queries_of = Rows::new(queries.q.row(t), heads, dim);
                        kernel.dot_f32(Rows::new(keys, in_block, dim), queries_of, products);
                        for set in 0..sets {
                            let at = (i * sets + set) * row + block * in_block;
                            // SAFETY: a block of a token is in one worker's share.
                            #[allow(unsafe_code)]
                            let to = unsafe { scores.slice_mut(at..at + in_block) };
                            match (indexer.score, queries.weights) {
                                (Score::Largest, _) => to.copy_from_slice(&products[set * in_block..][..in_block]),
                                (_, weights) => weigh(products, weights.map(|weights| weights.row(t)), to),
                            }
                        }
                    }
                }
                worker.barrier();
                for (i, Listed { row: t, seen, .. }) in of_wave() {
                    for set in 0..sets {
                        if !worker.share(tokens * sets).contains(&(i * sets + set)) {
                            continue;
                        }
                        let (at, list) = ((i * sets + set) * row, t * sets + set);
                        // SAFETY: after the barrier a set's scores and list belong to the worker whose share it is in.
                        #[allow(unsafe_code)]
                        let (scores, to, count, blocks) = unsafe {
                            (
                                scores.slice_mut(at..at + row),
                                positions.slice_mut(list * len..(list + 1) * len),
                                counts.slice_mut(list..list + 1),
                                candidates.slice_mut(t * of_token..(t + 1) * of_token),
                            )
                        };
                        match indexer.candidates {
                            Some(of) if seen <= of.blocks * of.size => {} // all of them
                            Some(of) if of.by == ChosenBy::Own => choose_blocks(&of, &scores[..seen], work, blocks),
                            Some(of) => limit(&of, blocks, &mut scores[..seen]),
                            None => {}
                        }
                        count[0] = choose(indexer, scores, seen, work, to) as u32;
                    }
                }
                worker.barrier();
            }
        });
    }
}

impl Rotary<'_, Cpu> {
    /// Rotates the first numbers of a head of token `t`.
    fn turn(&self, t: usize, head: &mut [f32]) {
        turn(self.angles.row(t), self.interleaved, head);
    }
}

/// Rotates the first numbers of a head by angles whose cos and sin are given.
fn turn(angles: &[f32], interleaved: bool, head: &mut [f32]) {
    let half = angles.len() / 2;
    let (cos, sin) = angles.split_at(half);
    for (i, (cos, sin)) in cos.iter().zip(sin).enumerate() {
        let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
        (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
    }
}

impl KeyNorm<'_, Cpu> {
    /// `to = (x - mean) / sqrt(variance + eps) * weight + bias`, or the RMS norm.
    fn apply(&self, kernel: &dyn Kernel, x: &[f32], to: &mut [f32]) {
        let Some(bias) = self.bias else { return kernel.rms_norm(x, self.weight, self.eps, to) };
        let n = x.len() as f32;
        let mean = x.iter().sum::<f32>() / n;
        let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / n;
        let scale = 1.0 / (variance + self.eps).sqrt();
        for ((to, x), (w, b)) in to.iter_mut().zip(x).zip(self.weight.iter().zip(bias)) {
            *to = (x - mean) * scale * w + b;
        }
    }
}

impl KeyPool<'_, Cpu> {
    /// The key of a unit, whose positions have a key and a gate each: in each number, the keys' sum weighted by the
    /// softmax of gate and bias.
    fn sum(&self, unit: &[f32], to: &mut [f32]) {
        let dim = to.len();
        let positions = || unit.chunks_exact(2 * dim).zip(self.bias.chunks_exact(dim));
        for (i, to) in to.iter_mut().enumerate() {
            let score = |(of, bias): (&[f32], &[f32])| of[dim + i] + bias[i];
            let largest = positions().map(score).fold(f32::NEG_INFINITY, f32::max);
            let (mut sum, mut all) = (0.0, 0.0);
            for (of, bias) in positions() {
                let share = (score((of, bias)) - largest).exp();
                sum += share * of[i];
                all += share;
            }
            *to = sum / all;
        }
    }
}

/// `sum_h weight_h relu(products[h])` of each key, heads ascending. `products` is `[heads, keys]`.
fn weigh(products: &[f32], weights: Option<&[f32]>, sums: &mut [f32]) {
    sums.fill(0.0);
    for (h, products) in products.chunks_exact(sums.len()).enumerate() {
        let weight = weights.map_or(1.0, |weights| weights[h]);
        for (sum, product) in sums.iter_mut().zip(products) {
            *sum += weight * product.max(0.0);
        }
    }
}

/// The positions that a query attends to, which sees `seen` of them, by the scores of keys; ascending. Returns how
/// many.
fn choose(indexer: &Indexer, scores: &[f32], seen: usize, work: &mut Numbers, to: &mut [u32]) -> usize {
    let (unit, top_k) = (indexer.unit, indexer.top_k);
    if matches!(indexer.score, Score::Entries { .. }) {
        let entries = seen / unit;
        best(&scores[..entries], work.take(entries), top_k, |i, entry| to[i] = entry as u32);
        return top_k;
    }
    if unit == 1 {
        let order = work.take(seen);
        best(&scores[..seen], order, top_k, |i, place| to[i] = place as u32);
        return top_k;
    }
    // Units that are scored; the one that the query stands in is whole, scored in part, or taken without a score.
    let units = if indexer.score == Score::Largest { seen.div_ceil(unit) } else { seen / unit };
    let (of_units, order) = work.take(2 * units).split_at_mut(units);
    match indexer.score {
        Score::Largest => {
            let keys = |u: usize| &scores[u * unit..seen.min((u + 1) * unit)];
            let largest = |keys: &[f32]| keys.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            of_units.iter_mut().enumerate().for_each(|(u, score)| *score = largest(keys(u)));
            of_units[units - 1] = f32::INFINITY;
        }
        _ => of_units.copy_from_slice(&scores[..units]),
    }
    let mut count = 0;
    let mut put = |positions: std::ops::Range<usize>| {
        for position in positions {
            to[count] = position as u32;
            count += 1;
        }
    };
    best(of_units, order, top_k, |_, u| put(u * unit..seen.min((u + 1) * unit)));
    if indexer.pools() {
        put(units * unit..seen);
    }
    count
}

/// The blocks of units with the largest scores, and the last one.
fn choose_blocks(of: &model::Candidates, scores: &[f32], work: &mut Numbers, to: &mut [u32]) {
    let units = scores.len().div_ceil(of.size);
    let (largest, order) = work.take(2 * units).split_at_mut(units);
    for (largest, scores) in largest.iter_mut().zip(scores.chunks(of.size)) {
        *largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    }
    largest[units - 1] = f32::INFINITY;
    best(largest, order, of.blocks, |i, block| to[i] = block as u32);
}

/// Leaves nothing but the scores of such blocks.
fn limit(of: &model::Candidates, blocks: &[u32], scores: &mut [f32]) {
    let mut from = 0;
    for block in blocks {
        let block = *block as usize * of.size;
        scores[from..block].fill(f32::NEG_INFINITY);
        from = block + of.size;
    }
    let rest = from.min(scores.len());
    scores[rest..].fill(f32::NEG_INFINITY);
}

/// Calls `taken(i, place)` for the places of the `count` largest scores, ascending; of equals the first is taken.
/// `order` is room for as many numbers as there are scores, which are more than `count`.
fn best(scores: &[f32], order: &mut [f32], count: usize, mut taken: impl FnMut(usize, usize)) {
    order.copy_from_slice(scores);
    let (_, &mut least, above) = order.select_nth_unstable_by(scores.len() - count, f32::total_cmp);
    let above = above.iter().filter(|x| x.total_cmp(&least).is_gt()).count();
    let (mut equals, mut i) = (count - above, 0);
    for (place, score) in scores.iter().enumerate() {
        match score.total_cmp(&least) {
            Ordering::Less => continue,
            Ordering::Equal if equals == 0 => continue,
            Ordering::Equal => equals -= 1,
            Ordering::Greater => {}
        }
        taken(i, place);
        i += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::Attend;
    use crate::kernel::random::Random;
    use crate::machine::workers::Team;
    use crate::model::EntryKeys;

    /// What `choose` means, by sorting: whole units by score, of equals the lower, and what is always taken.
    fn naive(indexer: &Indexer, scores: &[f32], seen: usize) -> Vec<u32> {
        let unit = indexer.unit;
        let own = (seen - 1) / unit;
        let mut ranked: Vec<(f32, usize)> = match indexer.score {
            Score::Weighted { .. } => scores[..seen].iter().copied().zip(0..).collect(),
            Score::Pooled | Score::Gated { .. } | Score::Entries { .. } => {
                scores[..seen / unit].iter().copied().zip(0..).collect()
            }
            Score::Largest => (0..=own)
                .map(|u| {
                    let keys = &scores[u * unit..seen.min((u + 1) * unit)];
                    let largest = keys.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
                    (if u == own { f32::INFINITY } else { largest }, u)
                })
                .collect(),
        };
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        if let Score::Entries { .. } = indexer.score {
            let mut all: Vec<u32> = ranked[..indexer.top_k].iter().map(|&(_, u)| u as u32).collect();
            all.sort_unstable();
            return all;
        }
        let taken = ranked[..indexer.top_k].iter().flat_map(|&(_, u)| u * unit..seen.min((u + 1) * unit));
        let rest = if indexer.score == Score::Pooled { seen / unit * unit..seen } else { 0..0 };
        let mut all: Vec<u32> = taken.chain(rest).map(|p| p as u32).collect();
        all.sort_unstable();
        all
    }

    fn indexer(unit: usize, top_k: usize, score: Score) -> Indexer {
        Indexer { num_heads: 1, head_dim: 1, interleaved: false, unit, top_k, score, candidates: None }
    }

    #[test]
    fn the_best_units_are_chosen_of_equals_the_lower() {
        let mut random = Random(5);
        let mut work = Numbers::default();
        for round in 0..2000 {
            let mut below = |n: usize| (random.uniform() * n as f64) as usize;
            let scores = [
                Score::Weighted { latent: 1 },
                Score::Largest,
                Score::Pooled,
                Score::Entries { latent: 1, keys: EntryKeys::OfPositions },
            ];
            let score = scores[round % 4];
            let unit = if round % 4 == 0 { 1 } else { [2, 4, 8, 16][below(4)] };
            let indexer = indexer(unit, 1 + below(9), score);
            let seen = indexer.most() + 1 + below(100);
            let levels = 1 + below(20); // few: many are equal
            let scores: Vec<f32> = (0..seen.next_multiple_of(BLOCK_SIZE)).map(|_| below(levels) as f32 - 3.0).collect();
            let mut to = vec![u32::MAX; indexer.listed()];
            let count = choose(&indexer, &scores, seen, &mut work, &mut to);
            assert_eq!(to[..count], naive(&indexer, &scores, seen), "{indexer:?}, {seen} seen");
        }
    }

    #[test]
    fn nothing_but_candidates_has_a_score() {
        let of = model::Candidates { by: ChosenBy::Own, blocks: 2, size: 4 };
        let mut scores = vec![0.0, 5.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 9.0, -1.0, 0.0, 0.0, -3.0];
        let mut blocks = [0; 2];
        choose_blocks(&of, &scores, &mut Numbers::default(), &mut blocks);
        assert_eq!(blocks, [2, 3], "the best one, and the last");
        limit(&of, &blocks, &mut scores);
        assert!(scores[..8].iter().all(|score| *score == f32::NEG_INFINITY));
        assert_eq!(scores[8..], [9.0, -1.0, 0.0, 0.0, -3.0]);
    }

    /// Raw keys of a sequence come in batches of any size; a unit's key is that of the mean at its first position.
    #[test]
    fn pooled_keys_do_not_depend_on_the_batch() {
        let cpu = Cpu::new(Arc::new(Team::new(&[0]).unwrap()), crate::kernel::best());
        let (dim, tokens, unit) = (6, 150, 4);
        let indexer = Indexer { head_dim: dim, ..indexer(unit, 3, Score::Pooled) };
        let mut random = Random(7);
        let raw: Vec<f32> = (0..tokens * dim).map(|_| random.uniform() as f32 - 0.5).collect();
        let (weight, inv_freq) = (vec![1.5, 0.5, 1.0, 2.0, 1.0, 0.25], vec![1.0, 0.1]);
        let norm = KeyNorm { weight: &weight, bias: None, eps: 1e-6 };
        let keys = |parts: &[usize]| {
            let mut index = cpu.index(4, &indexer).unwrap();
            let mut from = 0;
            for &to in parts {
                let mut batch = Batch::default();
                batch.push(&vec![1; to - from], from, &[2, 0, 3]);
                let (mut angles, mut keys) = (Tensor::new(to - from, 4), Tensor::new(to - from, dim));
                cpu.rope_angles(&inv_freq, 1.0, &batch, &mut angles);
                keys.data_mut().copy_from_slice(&raw[from * dim..to * dim]);
                let rotary = Rotary { angles: &angles, interleaved: false };
                cpu.index_write(&mut index, &batch, &indexer, (Some(&rotary), &norm, None), &keys);
                from = to;
            }
            let place = |u: usize| ([2, 0, 3][u / 16] * 16 + u % 16) * dim;
            (0..tokens / unit).flat_map(|u| index.keys[place(u)..place(u) + dim].to_vec()).collect::<Vec<f32>>()
        };
        let whole = keys(&[tokens]);
        assert_eq!(keys(&[1, 2, 3, 4, 63, 64, 65, 70, 129, 131, 150]), whole);
        for (u, got) in whole.chunks(dim).enumerate() {
            let mean = |d: usize| (0..unit).map(|i| raw[(u * unit + i) * dim + d]).sum::<f32>() / unit as f32;
            let mean: Vec<f32> = (0..dim).map(mean).collect();
            let rms = (mean.iter().map(|x| x * x).sum::<f32>() / dim as f32 + 1e-6).sqrt();
            let mut want: Vec<f32> = mean.iter().zip(&weight).map(|(x, w)| x / rms * w).collect();
            for (i, freq) in inv_freq.iter().enumerate() {
                let (sin, cos) = ((u * unit) as f32 * freq).sin_cos();
                (want[i], want[i + 2]) = (want[i] * cos - want[i + 2] * sin, want[i + 2] * cos + want[i] * sin);
            }
            assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 1e-5), "unit {u}: {got:?}, {want:?}");
        }
    }

    #[test]
    fn a_block_of_index_keys_goes_to_the_host_and_back() {
        let cpu = Cpu::new(Arc::new(Team::new(&[0]).unwrap()), crate::kernel::best());
        for score in [Score::Largest, Score::Pooled] {
            let indexer =
                Indexer { num_heads: 1, head_dim: 8, interleaved: false, unit: 4, top_k: 3, score, candidates: None };
            let mut index = cpu.index(3, &indexer).unwrap();
            let mut random = Random(3);
            for part in std::iter::once(&mut index.keys).chain(&mut index.raw) {
                part.iter_mut().for_each(|x| *x = random.uniform() as f32);
            }
            let mut host = vec![0; cpu.index_block_bytes(&index)];
            cpu.index_to_host(&index, 2, &mut host);
            cpu.index_to_device(&mut index, 1, &host);
            for (part, bytes) in index.of_blocks() {
                let block = |i: usize| &part[i * bytes / 4..(i + 1) * bytes / 4];
                assert!(block(1) == block(2) && block(0) != block(1));
            }
        }
    }
}

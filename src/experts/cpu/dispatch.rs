//! One `finish`, as all workers see it: the two phases of a layer, which no barrier divides.
#![allow(unsafe_code)]

use std::ops::Range;

use moebius_cache::pack::{ExpertKind, ExpertLayout, TILE_ROWS};

use super::columns::{Shares, Slots};
use super::pieces::{Active, Idle, LayerWork, Piece, Pieces};
use super::progress::Progress;
use super::tuning::{TOKEN_BLOCK, Tuning};
use crate::experts::Epilogue;
use crate::kernel::{Activations, ActivationsMut, Kernel, Start, Tiles};
use crate::machine::workers::{Shared, Worker};

/// What the workers read and write.
pub(super) struct Dispatch<'a> {
    pub(super) kernel: &'a dyn Kernel,
    pub(super) layout: ExpertLayout,
    pub(super) work: LayerWork<'a>,
    pub(super) progress: &'a Progress,
    pub(super) shares: Option<Shares<'a>>, // of `down`; none: it is claimed
    pub(super) epilogue: &'a Epilogue,
    pub(super) pair_tokens: &'a [u32],
    pub(super) pair_weights: &'a [f32],
    pub(super) tokens: usize,
    pub(super) x: &'a Activations,
    pub(super) hidden: Shared<'a, f32>,
    pub(super) hidden_q: ActivationsMut<'a>,
    pub(super) out: Shared<'a, f32>,
    pub(super) results: Shared<'a, f32>,
}

impl<'a> Dispatch<'a> {
    /// What one worker does.
    pub(super) fn run(&'a self, worker: &Worker<'_>) {
        let room = self.work.tuning.results();
        // SAFETY: each worker has its own part.
        let results = unsafe { self.results.slice_mut(worker.index * room..(worker.index + 1) * room) };
        let own = worker.node % self.work.memory.nodes();
        let (mut gate, mut down) = (Pieces::new(&self.work, 0, own), Pieces::new(&self.work, 1, own));
        let Tuning { look_ahead, idle_bytes, .. } = self.work.tuning;
        let bytes = |piece: Option<&Piece<'a>>| piece.map_or(&[][..], |piece| piece.bytes);

        // What is read next is known, and on its way, before a piece is done; after the last one of gate it is the
        // first one of down.
        let (mut piece, mut first_down) = (gate.next(worker), None);
        while let Some(now) = piece {
            let mut next = None;
            if look_ahead {
                next = gate.next(worker);
                first_down = match (&next, &self.shares) {
                    (Some(_), _) => None,
                    (None, Some(_)) => self.work.own_down_pieces(worker.count, worker.index).next(),
                    (None, None) => down.next(worker),
                };
            }
            self.gate_up(&now, bytes(next.as_ref().or(first_down.as_ref())), results);
            self.progress.add(&now, |active, inputs| self.form(active, inputs));
            piece = if look_ahead { next } else { gate.next(worker) };
        }
        if let Some(shares) = &self.shares {
            return self.down_by_columns(shares, worker, results);
        }
        let first_down = first_down.or_else(|| down.next(worker));
        let pieces = down.clone().rest_of_run();
        let mut idle = Idle { pieces, at: bytes(first_down.as_ref()), left: idle_bytes };
        let mut piece = first_down;
        while let Some(now) = piece {
            worker.wait_doing(|| self.progress.is_whole(now.active), || idle.step());
            let next = if look_ahead { down.next(worker) } else { None };
            self.down(&now, bytes(next.as_ref()), results);
            piece = if look_ahead { next } else { down.next(worker) };
        }
    }

    /// Brings some numbers of an expert's `h` into the form that `down` reads.
    fn form(&self, active: &Active, inputs: Range<usize>) {
        let k = self.layout.down.k;
        for pair in active.pairs.0..active.pairs.1 {
            // SAFETY: these numbers are complete: they are only read, and this worker alone brings them into form.
            unsafe {
                let h = self.hidden.slice(pair * k + inputs.start..pair * k + inputs.end);
                self.hidden_q.put_inputs(self.kernel, pair..pair + 1, inputs.start, h);
            }
        }
    }

    /// `hidden[pair][rows of the tiles]` for all pairs of an expert.
    fn gate_up(&self, Piece { active, tiles, bytes }: &Piece<'_>, next: &[u8], results: &mut [f32]) {
        let n = self.layout.down.k;
        let rows = tiles.start * TILE_ROWS..n.min(tiles.end * TILE_ROWS);
        let width = tiles.len() * TILE_ROWS;
        let weights = Tiles::before(bytes, next, self.work.tuning.ahead);
        for pairs in blocks(active.pairs) {
            let len = pairs.len() * width;
            let (y, rest) = results.split_at_mut(2 * len);
            if self.layout.kind() == ExpertKind::Ungated {
                let x = if self.tokens == 1 { self.x.rows(0..1) } else { self.x.rows(pairs.clone()) };
                self.kernel.matmul(&self.layout.gate, &weights, &x, Start::Zero, y);
                let h = &mut rest[..2 * len];
                self.epilogue.activate_ungated(self.kernel, self.work.layer, y, h);
                for (pair, h) in pairs.zip(h.chunks_exact(2 * width)) {
                    let first = pair * n + 2 * rows.start;
                    // SAFETY: as below; there are no half tiles.
                    unsafe { self.hidden.slice_mut(first..first + h.len()) }.copy_from_slice(h);
                }
                continue;
            }
            let (gate, rest) = rest.split_at_mut(len);
            let (up, rest) = rest.split_at_mut(len);
            let h = &mut rest[..len];
            let x = if self.tokens == 1 { self.x.rows(0..1) } else { self.x.rows(pairs.clone()) };
            self.kernel.matmul(&self.layout.gate, &weights, &x, Start::Zero, y);
            for (i, y) in y.as_chunks::<{ 2 * TILE_ROWS }>().0.iter().enumerate() {
                let [from_gate, from_up]: &[[f32; TILE_ROWS]; 2] = bytemuck::cast_ref(y);
                gate.as_chunks_mut::<TILE_ROWS>().0[i] = *from_gate;
                up.as_chunks_mut::<TILE_ROWS>().0[i] = *from_up;
            }
            self.epilogue.activate(self.kernel, (self.work.layer, active.expert), &rows, width, (gate, up, h));
            for (pair, h) in pairs.zip(h.chunks_exact(width)) {
                // SAFETY: in phase 1 these rows of `hidden` belong to the worker that claimed the tiles.
                let to = unsafe { self.hidden.slice_mut(pair * n + rows.start..pair * n + rows.end) };
                to.copy_from_slice(&h[..rows.len()]);
            }
        }
    }

    /// The columns of the output that are the worker's own, then those of others.
    fn down_by_columns(&self, shares: &Shares<'_>, worker: &Worker<'_>, results: &mut [f32]) {
        let hidden = self.layout.down.n;
        let slots = Slots { hidden, workers: worker.count };
        let has_tiles = |slot: &usize| !slots.tiles(*slot).is_empty();
        let own = slots.own(worker.index);
        let pieces = self.work.own_down_pieces(worker.count, worker.index);
        let mut idle = Idle { pieces, at: &[], left: self.work.tuning.idle_bytes };
        let mut is_whole = |number: usize| {
            worker.wait_doing(|| self.progress.is_whole(&self.work.active[number]), || idle.step());
        };
        let pieces_of = |slot, number| self.work.down_pieces(number, slots.tiles(slot));
        // Each piece of an expert, and the bytes that are probably read after it.
        let with_next = |slot, number, after: Option<(usize, usize)>| {
            let after = after.and_then(|(slot, number)| pieces_of(slot, number).next()).map(|piece| piece.bytes);
            let mut pieces = pieces_of(slot, number).peekable();
            std::iter::from_fn(move || {
                let piece = pieces.next()?;
                Some((piece, pieces.peek().map(|next| next.bytes).or(after).unwrap_or_default()))
            })
        };
        #[cfg(test)]
        super::tests::come_late(worker.index);
        for slot in own.clone().filter(has_tiles) {
            while let Some(number) = shares.take_first(slot) {
                is_whole(number);
                let after = match number + 1 < self.work.active.len() {
                    true => Some((slot, number + 1)),
                    false => (slot + 1 < own.end).then_some((slot + 1, 0)),
                };
                for (piece, next) in with_next(slot, number, after) {
                    self.down(&piece, next, results);
                }
            }
        }
        for slot in slots.others(worker.index).filter(has_tiles) {
            while let Some(number) = shares.take_last(slot) {
                is_whole(number);
                let after = number.checked_sub(1).map(|number| (slot, number));
                for (piece, next) in with_next(slot, number, after) {
                    self.down_products(&piece, next, results, |pair, rows, y| {
                        // SAFETY: the expert was taken of the slot by this worker alone.
                        unsafe { shares.room(pair, rows) }.copy_from_slice(y);
                    });
                }
                shares.leave(slot, number);
            }
        }
        for slot in own.filter(has_tiles) {
            let tiles = slots.tiles(slot);
            let rows = tiles.start * TILE_ROWS..hidden.min(tiles.end * TILE_ROWS);
            for number in shares.of_helpers(slot) {
                worker.wait_doing(|| shares.has_left(slot, number), || false);
                let (from, to) = self.work.active[number].pairs;
                for pair in from..to {
                    // SAFETY: they are there, as was waited for: the expert's pairs, the slot's rows.
                    self.add(pair, rows.clone(), unsafe { shares.products(pair, rows.clone()) });
                }
            }
        }
    }

    /// `out[token][rows] += weight * y` of a pair.
    fn add(&self, pair: usize, rows: Range<usize>, y: &[f32]) {
        let first = self.pair_tokens[pair] as usize * self.layout.down.n;
        // SAFETY: in phase 2 these columns of `out` belong to this worker.
        let out = unsafe { self.out.slice_mut(first + rows.start..first + rows.end) };
        self.kernel.add_scaled(y, self.pair_weights[pair], out);
    }

    /// `out[token][rows of the tiles] += weight * (down tiles . hidden[pair])` for all pairs of an expert.
    fn down(&self, piece: &Piece<'_>, next: &[u8], results: &mut [f32]) {
        self.down_products(piece, next, results, |pair, rows, y| self.add(pair, rows, y));
    }

    /// `each(pair, rows of the tiles, down tiles . hidden[pair])` for all pairs of an expert.
    fn down_products(
        &self,
        Piece { active, tiles, bytes }: &Piece<'_>,
        next: &[u8],
        results: &mut [f32],
        each: impl Fn(usize, Range<usize>, &[f32]),
    ) {
        let n = self.layout.down.n;
        let rows = tiles.start * TILE_ROWS..n.min(tiles.end * TILE_ROWS);
        let width = tiles.len() * TILE_ROWS;
        let weights = Tiles::before(bytes, next, self.work.tuning.ahead);
        for pairs in blocks(active.pairs) {
            let y = &mut results[..pairs.len() * width];
            // SAFETY: the expert's `h` is whole: no worker writes these rows.
            let h = unsafe { self.hidden_q.rows(pairs.clone()) };
            self.kernel.matmul(&self.layout.down, &weights, &h, Start::Zero, y);
            self.epilogue.finish((self.work.layer, active.expert), &rows, width, y);
            for (pair, y) in pairs.zip(y.chunks_exact(width)) {
                each(pair, rows.clone(), &y[..rows.len()]);
            }
        }
    }
}

/// Cuts a range of pairs into blocks of at most [`TOKEN_BLOCK`].
fn blocks((start, end): (usize, usize)) -> impl Iterator<Item = Range<usize>> {
    (start..end).step_by(TOKEN_BLOCK).map(move |from| from..end.min(from + TOKEN_BLOCK))
}

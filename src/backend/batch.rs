//! `Batch`: what one forward pass reads. Sequences lie one after the other, ragged, without padding.

use std::ops::Range;

/// Token positions of one KV block.
pub const BLOCK_SIZE: usize = 64;

/// Tokens of one or more sequences for one forward pass: prefill chunks and decode tokens mix.
#[derive(Debug, Default)]
pub struct Batch {
    /// Token ids, `[tokens]`.
    pub tokens: Vec<u32>,
    /// Position of each token in its sequence, `[tokens]`.
    pub positions: Vec<u32>,
    /// The sequences, in the order of their tokens.
    pub spans: Vec<Span>,
    /// KV blocks of all spans, one after the other.
    pub block_table: Vec<u32>,
}

/// The part of one sequence that is in a batch.
#[derive(Clone, Debug)]
pub struct Span {
    /// Its tokens in the batch.
    pub rows: Range<usize>,
    /// Position of its first token here; everything before is in the cache.
    pub start: usize,
    /// Where the layers keep the sequence's recurrent state, if they have any: alone there while it runs.
    pub slot: usize,
    /// Where in the batch's block table the sequence's blocks stand, from its position 0 on.
    pub blocks: Range<usize>,
}

impl Span {
    /// Its positions, cut where a block of the cache begins.
    pub fn by_block(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (start, end) = (self.start, self.start + self.rows.len());
        let blocks = start / BLOCK_SIZE..end.div_ceil(BLOCK_SIZE);
        blocks.map(move |i| start.max(i * BLOCK_SIZE)..end.min((i + 1) * BLOCK_SIZE))
    }
}

impl Clone for Batch {
    fn clone(&self) -> Self {
        let mut batch = Self::default();
        batch.clone_from(self);
        batch
    }

    // Keeps its memory.
    fn clone_from(&mut self, from: &Self) {
        self.tokens.clone_from(&from.tokens);
        self.positions.clone_from(&from.positions);
        self.spans.clone_from(&from.spans);
        self.block_table.clone_from(&from.block_table);
    }
}

impl Batch {
    /// The batch of some of its rows, sequences cut where they have to be; `to` keeps its memory.
    pub fn part(&self, rows: Range<usize>, to: &mut Batch) {
        to.clear();
        for span in self.spans.iter().filter(|span| span.rows.start < rows.end && rows.start < span.rows.end) {
            let (first, end) = (span.rows.start.max(rows.start), span.rows.end.min(rows.end));
            let part = to.push(
                &self.tokens[first..end],
                span.start + first - span.rows.start,
                &self.block_table[span.blocks.clone()],
            );
            part.slot = span.slot;
        }
    }

    /// Appends tokens of a sequence that stands at position `start`. A model with recurrent state needs the sequence's
    /// slot set, too.
    pub fn push(&mut self, tokens: &[u32], start: usize, blocks: &[u32]) -> &mut Span {
        assert!(
            !tokens.is_empty() && blocks.len() * BLOCK_SIZE >= start + tokens.len(),
            "blocks for every token of the span"
        );
        let first = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((start..start + tokens.len()).map(|p| p as u32));
        let table = self.block_table.len();
        self.block_table.extend_from_slice(blocks);
        self.spans.push(Span {
            rows: first..first + tokens.len(),
            start,
            slot: 0,
            blocks: table..table + blocks.len(),
        });
        self.spans.last_mut().expect("just pushed")
    }

    /// Empties the batch, keeping its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.spans.clear();
        self.block_table.clear();
    }

    /// Row of the KV storage that holds `position` of the sequence of `span`.
    pub fn slot(&self, span: &Span, position: usize) -> usize {
        self.block_table[span.blocks.start + position / BLOCK_SIZE] as usize * BLOCK_SIZE + position % BLOCK_SIZE
    }

    /// Tokens in the batch.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Nothing to do.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

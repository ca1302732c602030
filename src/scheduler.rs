//! What runs next: sequences join and leave between steps, prompts are read in chunks beside running answers.
//!
//! The scheduler sees token counts and KV blocks, never tensors.

use std::collections::VecDeque;

use crate::batch::Batch;
use crate::kv_cache::BlockPool;

/// One sequence: its tokens, and how many of them are in the cache.
#[derive(Debug)]
pub struct Sequence<T> {
    /// Prompt, then answer.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens whose keys and values are in the cache.
    pub cached: usize,
    /// Whatever the owner keeps with it.
    pub state: T,
    blocks: Vec<u32>,
    slot: usize, // while it runs: of recurrent state
}

impl<T> Sequence<T> {
    /// A sequence of which nothing is cached.
    pub fn new(prompt: Vec<u32>, state: T) -> Self {
        Self { prompt_tokens: prompt.len(), tokens: prompt, cached: 0, state, blocks: Vec::new(), slot: 0 }
    }
}

/// One sequence's part in the step that was just planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// Index among the running sequences.
    pub index: usize,
    /// Its tokens in the batch.
    pub tokens: usize,
    /// Row of its last token in the batch if that is the sequence's last token too: the row to sample from.
    pub last_row: Option<usize>,
}

/// Waiting and running sequences, and the blocks they hold.
#[derive(Debug)]
pub struct Scheduler<T> {
    waiting: VecDeque<Sequence<T>>,
    running: Vec<Sequence<T>>, // oldest first
    pool: BlockPool,
    free_slots: Vec<usize>, // below max_sequences, that no running sequence has
    max_sequences: usize,
    max_tokens: usize,
    plan: Vec<Scheduled>,
}

impl<T> Scheduler<T> {
    /// At most `max_sequences` run at once, in batches of at most `max_tokens` tokens.
    pub fn new(pool: BlockPool, max_sequences: usize, max_tokens: usize) -> Self {
        let free_slots = (0..max_sequences).rev().collect();
        Self { waiting: VecDeque::new(), running: Vec::new(), pool, free_slots, max_sequences, max_tokens, plan: Vec::new() }
    }

    /// Queues a sequence. Its final length must fit the pool: the owner has checked it against the context.
    pub fn add(&mut self, sequence: Sequence<T>) {
        self.waiting.push_back(sequence);
    }

    /// Nothing waits and nothing runs.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Blocks no sequence holds.
    pub fn free_blocks(&self) -> usize {
        self.pool.free_blocks()
    }

    /// The running sequence at `index`.
    pub fn sequence(&mut self, index: usize) -> &mut Sequence<T> {
        &mut self.running[index]
    }

    /// Fills `batch` with the next step: one token of every running answer, then chunks of prompts, oldest first.
    ///
    /// When the pool is empty the youngest sequence goes back to the queue and is computed again later. What frees up goes
    /// to the oldest that waits for it, so that small requests do not pass a large one forever.
    pub fn next(&mut self, batch: &mut Batch) -> &[Scheduled] {
        batch.clear();
        self.plan.clear();
        while self.running.len() < self.max_sequences
            && let Some(mut sequence) = self.waiting.pop_front()
        {
            sequence.slot = self.free_slots.pop().expect("as many slots as sequences run at most");
            self.running.push(sequence);
        }
        // Answers before prompts, so that a long prompt does not hold them up.
        for prompts in [false, true] {
            let mut index = 0;
            while index < self.running.len() {
                let missing = self.running[index].tokens.len() - self.running[index].cached;
                let room = self.max_tokens - batch.len();
                assert!(missing > 0, "a running sequence has a token to read: it ends or is sampled after each step at its end");
                if room > 0 && (missing > 1) == prompts && !self.plan.iter().any(|s| s.index == index) {
                    let tokens = missing.min(room);
                    if !self.make_room(index, tokens) {
                        break;
                    }
                    self.push(index, tokens, batch);
                }
                index += 1;
            }
        }
        assert!(!self.plan.is_empty() || self.running.is_empty(), "the pool holds any one sequence, and a batch one token");
        &self.plan
    }

    /// Gives sequence `index` blocks for `tokens` more tokens, taking them from younger, not yet planned ones if need be.
    fn make_room(&mut self, index: usize, tokens: usize) -> bool {
        loop {
            let sequence = &mut self.running[index];
            if self.pool.grow(&mut sequence.blocks, sequence.cached + tokens) {
                return true;
            }
            let youngest = self.running.len() - 1;
            if youngest == index || self.plan.iter().any(|s| s.index == youngest) {
                return false; // waits for a step in which blocks are free
            }
            let mut victim = self.running.remove(youngest);
            self.pool.release(&mut victim.blocks);
            self.free_slots.push(victim.slot);
            victim.cached = 0;
            self.waiting.push_front(victim);
        }
    }

    fn push(&mut self, index: usize, tokens: usize, batch: &mut Batch) {
        let sequence = &self.running[index];
        let end = sequence.cached + tokens;
        batch.push(&sequence.tokens[sequence.cached..end], sequence.cached, &sequence.blocks).slot = sequence.slot;
        let last_row = (end == sequence.tokens.len()).then(|| batch.len() - 1);
        self.plan.push(Scheduled { index, tokens, last_row });
    }

    /// The planned step, until sequences are added or retired.
    pub fn plan(&self) -> &[Scheduled] {
        &self.plan
    }

    /// Records that the planned step has run: its tokens are in the cache.
    pub fn commit(&mut self) {
        for s in &self.plan {
            self.running[s.index].cached += s.tokens;
        }
    }

    /// Takes out every sequence that `ended` says has ended, running or waiting, and frees its blocks.
    pub fn retire(&mut self, mut ended: impl FnMut(&Sequence<T>) -> bool, mut with: impl FnMut(Sequence<T>)) {
        let mut index = 0;
        while index < self.running.len() {
            if ended(&self.running[index]) {
                let mut sequence = self.running.remove(index);
                self.pool.release(&mut sequence.blocks);
                self.free_slots.push(sequence.slot);
                with(sequence);
            } else {
                index += 1;
            }
        }
        for _ in 0..self.waiting.len() {
            let sequence = self.waiting.pop_front().expect("as many as counted");
            if ended(&sequence) { with(sequence) } else { self.waiting.push_back(sequence) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::BLOCK_SIZE;

    fn scheduler(blocks: usize) -> Scheduler<u32> {
        Scheduler::new(BlockPool::new(blocks), 4, 100)
    }

    fn prompt(n: usize) -> Vec<u32> {
        (0..n as u32).collect()
    }

    #[test]
    fn a_prompt_is_read_in_chunks_and_sampled_at_its_end() {
        let (mut s, mut batch) = (scheduler(10), Batch::default());
        s.add(Sequence::new(prompt(150), 0));
        assert_eq!(s.next(&mut batch), [Scheduled { index: 0, tokens: 100, last_row: None }]);
        s.commit();
        assert_eq!(s.next(&mut batch), [Scheduled { index: 0, tokens: 50, last_row: Some(49) }]);
        assert_eq!((batch.positions[0], batch.spans[0].start), (100, 100));
    }

    #[test]
    fn answers_go_before_prompts() {
        let (mut s, mut batch) = (scheduler(10), Batch::default());
        s.add(Sequence::new(prompt(150), 0));
        s.next(&mut batch);
        s.commit();
        s.add(Sequence::new(prompt(1), 1));
        let plan = s.next(&mut batch);
        assert_eq!(plan[0], Scheduled { index: 1, tokens: 1, last_row: Some(0) });
        assert_eq!(plan[1].tokens, 50);
    }

    #[test]
    fn the_youngest_gives_way_and_comes_back() {
        let (mut s, mut batch) = (scheduler(3), Batch::default());
        s.add(Sequence::new(prompt(BLOCK_SIZE), 0));
        s.add(Sequence::new(prompt(90), 1));
        s.next(&mut batch);
        s.commit();
        assert_eq!((batch.len(), s.free_blocks()), (100, 1), "all of the first, a part of the second");
        s.sequence(0).tokens.extend(0..BLOCK_SIZE as u32 + 1);
        let plan = s.next(&mut batch);
        assert_eq!(
            plan,
            [Scheduled { index: 0, tokens: 65, last_row: Some(64) }],
            "the oldest needs two blocks: the youngest gives its own"
        );
        s.commit();
        s.retire(|q| q.state == 0, |_| {});
        assert_eq!(s.next(&mut batch), [Scheduled { index: 0, tokens: 90, last_row: Some(89) }], "computed again from its start");
    }

    #[test]
    fn small_prompts_do_not_pass_a_large_one() {
        let (mut s, mut batch) = (scheduler(4), Batch::default());
        for state in 0..3 {
            s.add(Sequence::new(prompt(60), state));
        }
        s.next(&mut batch);
        s.commit();
        for state in 0..2 {
            s.sequence(state).tokens.push(0);
        }
        // Two answers and a part of the third prompt hold three blocks.
        s.retire(|q| q.state == 2, |_| {});
        s.add(Sequence::new(prompt(3 * BLOCK_SIZE), 3));
        s.add(Sequence::new(prompt(30), 4));
        let plan = s.next(&mut batch).to_vec();
        s.commit();
        assert_eq!(plan.len(), 3, "two answers, and the first chunk of the large prompt");
        for state in 0..2 {
            s.sequence(state).tokens.push(0);
        }
        let plan = s.next(&mut batch).to_vec();
        assert!(plan.iter().all(|p| p.index < 2), "{plan:?}: no room for the rest of the large prompt, so none for the small one");
    }

    #[test]
    fn ended_sequences_free_their_blocks() {
        let (mut s, mut batch) = (scheduler(5), Batch::default());
        s.add(Sequence::new(prompt(90), 0));
        s.next(&mut batch);
        s.commit();
        assert_eq!(s.free_blocks(), 3);
        let mut ended = 0;
        s.retire(|_| true, |_| ended += 1);
        assert_eq!((ended, s.free_blocks(), s.is_idle()), (1, 5, true));
    }
}

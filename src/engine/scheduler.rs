//! What runs next: sequences join and leave between steps, and prefill in parts beside others that decode.
//!
//! The scheduler sees token counts and KV blocks, never tensors. Where layers have recurrent state, it says what is
//! copied between a sequence's slot and a snapshot: before a step the states from which sequences go on, and after it
//! those at which others may. Prefill stops at the ends of messages for that; beyond them a snapshot moves along.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;

use crate::backend::batch::{BLOCK_SIZE, Batch};
use crate::forward::block_pool::{BlockMove, BlockPool, BlockTable, Keep, Shared, Tenant, Text};

/// Tokens of prefill that a sequence gets at least when it gets any, unless it needs fewer: smaller shares cost more
/// than they help.
const LEAST_SHARE: usize = 32;

/// What a step does for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Reads a part of its prompt, or of what it has to compute again.
    Prefill,
    /// Reads its newest token, to generate the next.
    Decode,
}

/// One sequence: its tokens, and how many of them are in the cache.
#[derive(Debug)]
pub struct Sequence<T> {
    /// Prompt, then answer.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens whose keys and values are in the cache.
    pub cached: usize,
    /// Tokens of the prompt that other sequences had computed.
    pub shared: usize,
    /// It had to give its blocks back, and finds again what was its own.
    gave_way: bool,
    /// Of its tokens from the first on, so many whose keys and values may be what others computed.
    pub reuses: usize,
    /// So many whose keys and values are those of the text alone, for others to use; no fewer than it reuses.
    pub offers: usize,
    /// Ends of blocks, ascending, at which its prefill stops and its state is kept: where another may begin alike.
    pub stops: Vec<usize>,
    /// So many of its tokens others had read, whether it could go on from there or not: where it parts from them a
    /// third may part as well.
    known: usize,
    /// Whom it is for: clients take turns.
    pub client: u64,
    /// Whatever the owner keeps with it.
    pub state: T,
    table: BlockTable,
    slot: usize, // while it runs: of recurrent state
}

impl<T> Sequence<T> {
    /// A sequence of which nothing is cached.
    pub fn new(prompt: Vec<u32>, client: u64, state: T) -> Self {
        Self {
            prompt_tokens: prompt.len(),
            tokens: prompt,
            cached: 0,
            shared: 0,
            gave_way: false,
            reuses: usize::MAX,
            offers: usize::MAX,
            stops: Vec::new(),
            known: 0,
            client,
            state,
            table: BlockTable::default(),
            slot: 0,
        }
    }

    /// The same, but it shares blocks with sequences of `tenant`.
    pub fn of(self, tenant: Tenant) -> Self {
        Self { table: BlockTable::new(tenant), ..self }
    }

    /// Tokens that are not in the cache yet.
    fn missing(&self) -> usize {
        self.tokens.len() - self.cached
    }

    /// What it needs next; `None`: nothing. A prompt of which one token is left is no more work than decode.
    fn phase(&self) -> Option<Phase> {
        match self.missing() {
            0 => None,
            1 => Some(Phase::Decode),
            _ => Some(Phase::Prefill),
        }
    }

    /// Takes what others have computed of it from `pool`; and says the text that it has to compute next, if others
    /// could use that.
    fn share(&mut self, pool: &mut BlockPool) -> (Shared, Option<Text>) {
        let tokens = &self.tokens[..self.tokens.len().min(self.reuses)];
        let is_new = self.table.is_empty();
        let shared = pool.share(&mut self.table, tokens);
        self.cached += shared.tokens;
        if !self.gave_way {
            self.shared += shared.tokens;
        }
        if pool.keeps_states() && is_new {
            self.known = shared.known_tokens;
        }
        (shared, pool.next_text(&self.table, tokens))
    }

    /// Where its prefill stops next.
    fn next_stop(&self) -> Option<usize> {
        let stops = self.stops.iter().chain([&self.known]);
        stops.copied().filter(|&stop| stop > self.cached && stop < self.tokens.len()).min()
    }

    /// Tokens that prefill may read before its state is kept.
    fn until_stop(&self) -> usize {
        self.next_stop().unwrap_or(self.tokens.len()) - self.cached
    }

    /// Whether it can go on from a state at which `other` will stop.
    fn waits_for(&self, other: &Self) -> bool {
        other.next_stop().is_some_and(|stop| {
            self.cached < stop
                && stop < self.tokens.len().min(self.reuses)
                && stop <= other.offers
                && self.table.tenant() == other.table.tenant()
                && self.tokens[..stop] == other.tokens[..stop]
        })
    }
}

/// A sequence's state is copied from its slot to a snapshot, or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateCopy {
    /// Of the sequence.
    pub slot: usize,
    /// Of the pool.
    pub snapshot: u32,
}

/// One sequence's part in the step that was just planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// Index among the running sequences.
    pub index: usize,
    /// What the step does for it.
    pub phase: Phase,
    /// Its rows of the batch.
    pub rows: Range<usize>,
    /// Those of them to sample from; empty: the sequence does not end here.
    pub sampled: Range<usize>,
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
    shares: Vec<(usize, usize)>, // of this step's prefill: a sequence's index, and the tokens it may read
    restores: Vec<StateCopy>,    // of this step
    saves: Vec<StateCopy>,       // of the last step
    preempted: u64,
}

impl<T> Scheduler<T> {
    /// At most `max_sequences` run at once, in batches of at most `max_tokens` tokens.
    pub fn new(pool: BlockPool, max_sequences: usize, max_tokens: usize) -> Self {
        let (waiting, running, free_slots) = (VecDeque::new(), Vec::new(), (0..max_sequences).rev().collect());
        Self {
            waiting,
            running,
            pool,
            free_slots,
            max_sequences,
            max_tokens,
            plan: Vec::new(),
            shares: Vec::new(),
            restores: Vec::new(),
            saves: Vec::new(),
            preempted: 0,
        }
    }

    /// Queues a sequence. Its final length must fit the pool: the owner has checked it against the context.
    pub fn add(&mut self, sequence: Sequence<T>) {
        self.waiting.push_back(sequence);
    }

    /// Nothing waits and nothing runs.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// The blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Sequences that run.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// How often a sequence had to give its blocks back and wait.
    pub fn preempted(&self) -> u64 {
        self.preempted
    }

    /// The running sequence at `index`.
    pub fn sequence(&mut self, index: usize) -> &mut Sequence<T> {
        &mut self.running[index]
    }

    /// Fills `batch` with the next step: one token of every sequence that decodes, then parts of those that prefill,
    /// which beside decode have `prefill_tokens` tokens together.
    ///
    /// When the pool is empty the youngest sequence goes back to the queue and is computed again later. What frees up
    /// goes to the oldest that waits for it, so that small requests do not pass a large one forever.
    pub fn next(&mut self, batch: &mut Batch, prefill_tokens: usize) -> &[Scheduled] {
        batch.clear();
        self.plan.clear();
        self.restores.clear();
        self.admit();
        // Decode before prefill, so that a long prompt does not hold it up.
        let mut index = 0;
        while index < self.running.len() && batch.len() < self.max_tokens {
            if self.running[index].phase() == Some(Phase::Decode) && !self.push(index, Phase::Decode, 1, batch) {
                break;
            }
            index += 1;
        }
        let room = self.max_tokens - batch.len();
        self.share_out(if self.plan.is_empty() { room } else { room.min(prefill_tokens) });
        for i in 0..self.shares.len() {
            let (index, tokens) = self.shares[i];
            // Sequences that gave way are not running any more.
            if index >= self.running.len() || !self.push(index, Phase::Prefill, tokens, batch) {
                break;
            }
        }
        assert!(
            !self.plan.is_empty() || self.running.is_empty(),
            "the pool holds any one sequence, and a batch one token"
        );
        &self.plan
    }

    /// Lets waiting sequences run: of the client that has the fewest running, the one that came first.
    fn admit(&mut self) {
        while self.running.len() < self.max_sequences && !self.waiting.is_empty() {
            let of = |client: u64| self.running.iter().filter(|s| s.client == client).count();
            let next = (0..self.waiting.len()).min_by_key(|&i| of(self.waiting[i].client)).expect("a sequence waits");
            let mut sequence = self.waiting.remove(next).expect("just found");
            sequence.slot = self.free_slots.pop().expect("as many slots as sequences run at most");
            self.running.push(sequence);
        }
    }

    /// Takes a running sequence out, and back what it holds.
    fn stop(&mut self, index: usize) -> Sequence<T> {
        let mut sequence = self.running.remove(index);
        self.pool.release(&mut sequence.table);
        self.free_slots.push(sequence.slot);
        sequence
    }

    /// Cuts `tokens` into shares of the sequences that prefill: alike for all, what a short one leaves going to the
    /// others, and the oldest never without.
    ///
    /// A sequence takes what others have computed of it. One whose next block another computes in this very step waits
    /// for it; one that has a state to go on from once another has come to its stop, for that.
    fn share_out(&mut self, tokens: usize) {
        self.shares.clear();
        let mut computing = HashSet::new();
        for index in 0..self.running.len() {
            let (older, younger) = self.running.split_at_mut(index);
            let sequence = &mut younger[0];
            if sequence.phase() != Some(Phase::Prefill) {
                continue;
            }
            let (shared, next) = sequence.share(&mut self.pool);
            self.restores.extend(shared.snapshot.map(|snapshot| StateCopy { slot: sequence.slot, snapshot }));
            let computes = match self.pool.keeps_states() {
                true => !self.shares.iter().any(|&(other, _)| sequence.waits_for(&older[other])),
                false => next.is_none_or(|text| computing.insert(text)),
            };
            if computes {
                self.shares.push((index, sequence.until_stop()));
            }
        }
        if let [_, rest @ ..] = &mut *self.shares {
            rest.sort_by_key(|&(_, missing)| missing);
        }
        let (mut left, mut sharers) = (tokens, self.shares.len());
        for (index, share) in &mut self.shares {
            let sequence = &self.running[*index];
            *share = (left / sharers).max(LEAST_SHARE.min(left)).min(*share);
            // Whole blocks, so that the next prompt that begins alike can share them.
            let end = (sequence.cached + *share) / BLOCK_SIZE * BLOCK_SIZE;
            if *share < sequence.until_stop() && end > sequence.cached {
                *share = end - sequence.cached;
            }
            left -= *share;
            sharers -= 1;
        }
        self.shares.retain(|&(_, share)| share > 0);
        self.shares.sort_unstable();
    }

    /// Puts the next `tokens` tokens of sequence `index` into the batch, with blocks taken from younger, not yet
    /// planned sequences if need be. Returns false when it has to wait for a step in which blocks are free.
    fn push(&mut self, index: usize, phase: Phase, tokens: usize, batch: &mut Batch) -> bool {
        loop {
            let sequence = &mut self.running[index];
            let end = sequence.cached + tokens;
            if self.pool.grow(&mut sequence.table, end) {
                let span = batch.push(&sequence.tokens[sequence.cached..end], sequence.cached, &sequence.table);
                span.slot = sequence.slot;
                let rows = span.rows.clone();
                let ends = usize::from(end == sequence.tokens.len());
                self.plan.push(Scheduled { index, phase, sampled: rows.end - ends..rows.end, rows });
                return true;
            }
            let youngest = self.running.len() - 1;
            if youngest == index || self.plan.iter().any(|s| s.index == youngest) {
                return false;
            }
            let mut victim = self.stop(youngest);
            if victim.cached > 0 {
                (victim.cached, victim.gave_way) = (0, true);
                self.preempted += 1;
            }
            self.waiting.push_front(victim);
        }
    }

    /// The planned step, until sequences are added or retired.
    pub fn plan(&self) -> &[Scheduled] {
        &self.plan
    }

    /// Tokens of prefill in the planned step, those that are computed again among them.
    pub fn prefill_tokens(&self) -> usize {
        let prefill = self.plan.iter().filter(|part| part.phase == Phase::Prefill);
        prefill.map(|part| part.rows.len()).sum()
    }

    /// The blocks that move between the device and the host before the planned step, in this order.
    pub fn take_moves(&mut self) -> impl Iterator<Item = BlockMove> {
        self.pool.take_moves()
    }

    /// The states from which sequences of the planned step go on, to be restored before it.
    pub fn restores(&self) -> &[StateCopy] {
        &self.restores
    }

    /// Records that the planned step has run: its tokens are in the cache. Returns the states that are to be saved
    /// before the next one.
    pub fn commit(&mut self) -> &[StateCopy] {
        self.saves.clear();
        for s in &self.plan {
            let Sequence { cached, offers, tokens, table, stops, known, slot, .. } = &mut self.running[s.index];
            *cached += s.rows.len();
            self.pool.fill(table, &tokens[..(*cached).min(*offers)]);
            if self.pool.keeps_states() && table.known_tokens() == *cached {
                let keep = if stops.contains(cached) || known == cached { Keep::ForOthers } else { Keep::UntilTheNext };
                let snapshot = self.pool.keep_state(table, keep);
                self.saves.extend(snapshot.map(|snapshot| StateCopy { slot: *slot, snapshot }));
            }
        }
        &self.saves
    }

    /// Takes out every sequence that `ended` says has ended, running or waiting, and frees its blocks.
    pub fn retire(&mut self, mut ended: impl FnMut(&Sequence<T>) -> bool, mut with: impl FnMut(Sequence<T>)) {
        let mut index = 0;
        while index < self.running.len() {
            if ended(&self.running[index]) {
                with(self.stop(index));
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
    use crate::forward::block_pool::Sharing;

    fn scheduler(blocks: usize) -> Scheduler<u32> {
        Scheduler::new(BlockPool::new(blocks).sharing(Sharing::Blocks), 4, 100)
    }

    fn prompt(n: usize, seed: u32) -> Vec<u32> {
        (0..n as u32).map(|i| i + 1000 * seed).collect()
    }

    fn add(s: &mut Scheduler<u32>, tokens: usize, state: u32) {
        s.add(Sequence::new(prompt(tokens, state), 0, state));
    }

    /// Plans and runs a step; who read how many tokens.
    fn step(s: &mut Scheduler<u32>, prefill_tokens: usize) -> Vec<(u32, usize)> {
        let plan = s.next(&mut Batch::default(), prefill_tokens).to_vec();
        s.commit();
        plan.iter().map(|part| (s.sequence(part.index).state, part.rows.len())).collect()
    }

    /// Every running sequence whose tokens are all in the cache gets one more.
    fn answer(s: &mut Scheduler<u32>) {
        s.running.iter_mut().filter(|q| q.missing() == 0).for_each(|q| q.tokens.push(5));
    }

    #[test]
    fn a_prompt_is_read_in_whole_blocks_and_sampled_at_its_end() {
        let (mut s, mut batch) = (scheduler(10), Batch::default());
        add(&mut s, 150, 0);
        let part = |phase, rows, sampled| [Scheduled { index: 0, phase, rows, sampled }];
        assert_eq!(s.next(&mut batch, 100), part(Phase::Prefill, 0..64, 64..64));
        s.commit();
        assert_eq!(s.next(&mut batch, 100), part(Phase::Prefill, 0..86, 85..86));
        assert_eq!((batch.positions[0], batch.spans[0].start), (64, 64));
        s.commit();
        answer(&mut s);
        assert_eq!(s.next(&mut batch, 100), part(Phase::Decode, 0..1, 0..1));
    }

    #[test]
    fn decode_goes_before_prefill_which_beside_it_comes_in_smaller_parts() {
        let mut s = scheduler(10);
        add(&mut s, 1, 0);
        assert_eq!(step(&mut s, 32), [(0, 1)]);
        answer(&mut s);
        add(&mut s, 150, 1);
        assert_eq!(step(&mut s, 32), [(0, 1), (1, 32)]);
        assert_eq!(s.prefill_tokens(), 32);
        s.retire(|q| q.state == 0, |_| {});
        assert_eq!(step(&mut s, 32), [(1, 96)], "alone it may fill the batch, up to the end of a block");
    }

    #[test]
    fn prefills_get_equal_shares_and_what_short_ones_leave() {
        let mut s = Scheduler::new(BlockPool::new(100).sharing(Sharing::Blocks), 4, 512);
        add(&mut s, 2000, 0);
        add(&mut s, 1000, 1);
        add(&mut s, 40, 2);
        assert_eq!(step(&mut s, 512), [(0, 128), (1, 320), (2, 40)], "512 / 3 in whole blocks, 40, and the rest");
        answer(&mut s);
        assert_eq!(step(&mut s, 64), [(2, 1), (0, 32), (1, 32)]);
    }

    #[test]
    fn beginnings_are_computed_once() {
        let mut s = Scheduler::new(BlockPool::new(100).sharing(Sharing::Blocks), 4, 512);
        for state in 0..3 {
            let mut tokens = prompt(200, 9);
            tokens.push(state);
            s.add(Sequence::new(tokens, 0, state));
        }
        assert_eq!(step(&mut s, 512), [(0, 201)], "the others wait for what is being computed");
        assert_eq!(step(&mut s, 512), [(1, 9), (2, 9)]);
        assert_eq!((s.sequence(0).shared, s.sequence(1).shared, s.sequence(2).shared), (0, 192, 192));
        s.retire(|_| true, |_| {});
        s.add(Sequence::new(prompt(193, 9), 0, 3));
        assert_eq!(step(&mut s, 512), [(3, 1)], "kept after all have ended");
    }

    #[test]
    fn prefill_stops_where_the_state_is_kept_and_others_wait_for_it() {
        let mut s = Scheduler::new(BlockPool::new(100).sharing(Sharing::States(8)), 4, 512);
        for state in 0..3 {
            let tokens = [prompt(200, 9), prompt(100, state)].concat();
            s.add(Sequence { stops: vec![192, 256], ..Sequence::new(tokens, 0, state) });
        }
        assert_eq!(step(&mut s, 512), [(0, 192)], "the others wait for the state");
        assert_eq!(step(&mut s, 512), [(0, 64), (1, 64), (2, 64)]);
        assert_eq!(s.restores().iter().map(|copy| copy.slot).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(step(&mut s, 512), [(0, 44), (1, 44), (2, 44)]);
        assert_eq!((s.sequence(0).shared, s.sequence(1).shared, s.sequence(2).shared), (0, 192, 192));
        assert_eq!(s.pool().kept_states(), 4);
        s.retire(|_| true, |_| {});
        assert_eq!((s.pool().kept_blocks(), s.pool().kept_states()), (6, 4));
        // A fourth parts from all of them where nothing was kept.
        s.add(Sequence::new([prompt(130, 9), prompt(170, 4)].concat(), 0, 4));
        assert_eq!(step(&mut s, 512), [(4, 128)], "where it parts from the others the next may");
        assert_eq!(step(&mut s, 512), [(4, 172)]);
        s.retire(|_| true, |_| {});
        s.add(Sequence::new([prompt(130, 9), prompt(170, 5)].concat(), 0, 5));
        assert_eq!(step(&mut s, 512), [(5, 172)]);
    }

    /// An answer's state moves on block by block; who gives way finds it again.
    #[test]
    fn an_answers_state_is_kept_at_its_last_block() {
        let mut s = Scheduler::new(BlockPool::new(100).sharing(Sharing::States(8)), 4, 512);
        add(&mut s, 100, 0);
        for _ in 0..300 {
            step(&mut s, 512);
            answer(&mut s);
        }
        assert_eq!(s.pool().kept_states(), 1);
        let tokens = s.sequence(0).tokens.clone();
        s.retire(|_| true, |_| {});
        s.add(Sequence::new(tokens, 0, 1));
        assert_eq!((step(&mut s, 512), s.sequence(0).shared), (vec![(1, 16)], 384));
    }

    #[test]
    fn tenants_do_not_wait_for_each_others_beginnings() {
        let mut s = Scheduler::new(BlockPool::new(100).sharing(Sharing::Blocks), 4, 512);
        for (state, tenant) in [(0, 1), (1, 2), (2, 1)] {
            s.add(Sequence::new(prompt(193, 9), 0, state).of(Tenant(tenant)));
        }
        assert_eq!(step(&mut s, 512), [(0, 193), (1, 193)], "each tenant's first");
        assert_eq!(step(&mut s, 512), [(2, 1)]);
        assert_eq!((s.sequence(1).shared, s.sequence(2).shared), (0, 192));
    }

    #[test]
    fn clients_take_turns() {
        let mut s = scheduler(100);
        for state in 0..6 {
            s.add(Sequence::new(prompt(1, state), 1, state));
        }
        s.add(Sequence::new(prompt(1, 6), 2, 6));
        let first: Vec<u32> = step(&mut s, 100).iter().map(|&(state, _)| state).collect();
        assert_eq!(first, [0, 6, 1, 2], "who has none running is next");
    }

    /// An answer that has filled its first block, and a prompt beside it that waits for memory; then the answer needs a
    /// third block.
    fn short_of_blocks(blocks: usize, prompt_tokens: usize) -> Scheduler<u32> {
        let mut s = scheduler(blocks);
        add(&mut s, BLOCK_SIZE, 0);
        step(&mut s, 100);
        add(&mut s, prompt_tokens, 1);
        for _ in 0..BLOCK_SIZE {
            answer(&mut s);
            step(&mut s, 100);
        }
        assert_eq!(s.preempted(), 0);
        answer(&mut s);
        assert_eq!(step(&mut s, 100), [(0, 1)], "the youngest gives its blocks");
        assert_eq!(s.preempted(), 1);
        s.retire(|q| q.state == 0, |_| {});
        s
    }

    #[test]
    fn the_youngest_gives_way_and_comes_back() {
        let mut s = short_of_blocks(3, 100);
        assert_eq!(step(&mut s, 100), [(1, 100)], "computed again from its start");
        assert_eq!(s.prefill_tokens(), 100, "as long as any prefill");
        assert_eq!(s.sequence(0).shared, 0);
    }

    #[test]
    fn who_gave_way_finds_what_nobody_needed() {
        let mut s = short_of_blocks(4, 204);
        assert_eq!(step(&mut s, 100), [(1, 64)], "its first block was still there");
        assert_eq!(s.sequence(0).shared, 0, "its own");
    }

    #[test]
    fn small_prompts_do_not_pass_a_large_one_forever() {
        let mut s = scheduler(4);
        add(&mut s, 4 * BLOCK_SIZE, 0);
        for state in 1..40 {
            add(&mut s, 60, state);
            step(&mut s, 100);
            if s.running.iter().any(|q| q.state == 0 && q.missing() == 0) {
                return;
            }
            s.retire(|q| q.state != 0 && q.missing() == 0, |_| {});
        }
        panic!("the large prompt still waits");
    }

    #[test]
    fn ended_sequences_free_their_blocks() {
        let mut s = scheduler(5);
        add(&mut s, 90, 0);
        step(&mut s, 100);
        assert_eq!(s.pool().free_blocks(), 3);
        let mut ended = 0;
        s.retire(|_| true, |_| ended += 1);
        assert_eq!((ended, s.pool().free_blocks(), s.pool().kept_blocks(), s.is_idle()), (1, 5, 1, true));
    }
}

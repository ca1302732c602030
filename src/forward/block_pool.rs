//! Blocks of the KV cache, handed out to sequences.
//!
//! A full block is keyed by the text up to its end. Sequences of the same tenant with the same prefix share it. It
//! stays after its sequence has ended, until another sequence needs the memory.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::backend::batch::BLOCK_SIZE;

/// Whose text it is, any number: sequences of one tenant share blocks, those of two never do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(pub u32);

/// The text that a full block ends. Compared whole, so that no two texts are taken for one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Text {
    tenant: Tenant,
    before: u64, // the node of the text before it
    tokens: [u32; BLOCK_SIZE],
}

/// The node of no text at all.
const ROOT: u64 = 0;

/// The blocks of one sequence, from its position 0 on.
#[derive(Debug, Default)]
pub struct BlockTable {
    tenant: Tenant,
    blocks: Vec<u32>,
    node: u64, // of the text of the first `known` blocks
    known: usize,
}

impl BlockTable {
    /// No blocks yet, for a sequence of `tenant`.
    pub fn new(tenant: Tenant) -> Self {
        Self { tenant, ..Self::default() }
    }

    /// The text that fills its next block if it goes on with `tokens`, the block's own first.
    fn text(&self, tokens: &[u32]) -> Text {
        let tokens = tokens[..BLOCK_SIZE].try_into().expect("a block's tokens");
        Text { tenant: self.tenant, before: self.node, tokens }
    }
}

impl std::ops::Deref for BlockTable {
    type Target = [u32];

    /// Block numbers; position `p` is in number `p / BLOCK_SIZE`.
    fn deref(&self) -> &[u32] {
        &self.blocks
    }
}

/// What the pool holds of a block.
#[derive(Debug, Default)]
struct Block {
    users: u32,              // sequences that hold it
    text: Option<Arc<Text>>, // known by
    released: u64,           // its key in `Holding::kept`, once no sequence holds it
}

/// The blocks of one tenant.
#[derive(Debug, Default)]
struct Holding {
    used: usize,              // sequences hold them
    kept: BTreeMap<u64, u32>, // no sequence holds them, but their text is known; least recently used first
}

impl Holding {
    fn blocks(&self) -> usize {
        self.used + self.kept.len()
    }
}

/// Hands out blocks; a block is the same index in every layer.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    free: Vec<u32>, // of no use to anyone
    tenants: BTreeMap<Tenant, Holding>,
    kept: usize,                           // of all tenants
    texts: HashMap<Arc<Text>, (u64, u32)>, // -> its node, and the block
    clock: u64,
    nodes: u64,
    reuse: bool,
}

impl BlockPool {
    /// `total` free blocks.
    pub fn new(total: usize) -> Self {
        Self {
            blocks: std::iter::repeat_with(Block::default).take(total).collect(),
            free: (0..total as u32).rev().collect(),
            tenants: BTreeMap::new(),
            kept: 0,
            texts: HashMap::new(),
            clock: 0,
            nodes: ROOT,
            reuse: false,
        }
    }

    /// The same, but texts that begin alike share blocks if `reuse` says so.
    pub fn reusing(self, reuse: bool) -> Self {
        Self { reuse, ..self }
    }

    /// Blocks of the pool.
    pub fn total_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks no sequence holds.
    pub fn free_blocks(&self) -> usize {
        self.free.len() + self.kept
    }

    /// Of these, blocks whose text is kept.
    pub fn kept_blocks(&self) -> usize {
        self.kept
    }

    /// Extends `table` until it covers `tokens` tokens; takes nothing and returns false when there are too few free
    /// blocks.
    pub fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> bool {
        let missing = tokens.div_ceil(BLOCK_SIZE).saturating_sub(table.blocks.len());
        if missing > self.free_blocks() {
            return false;
        }
        for _ in 0..missing {
            let block = self.free.pop().or_else(|| self.forget()).expect("counted just above");
            self.blocks[block as usize].users = 1;
            table.blocks.push(block);
        }
        self.tenants.entry(table.tenant).or_default().used += missing;
        true
    }

    /// Frees the least recently used kept block of the tenant that holds the most blocks, so that no tenant pushes out
    /// another that holds fewer.
    fn forget(&mut self) -> Option<u32> {
        let keepers = self.tenants.values_mut().filter(|holding| !holding.kept.is_empty());
        let holding = keepers.max_by_key(|holding| {
            (holding.blocks(), holding.kept.first_key_value().map(|(&released, _)| Reverse(released)))
        })?;
        let (_, block) = holding.kept.pop_first()?;
        self.kept -= 1;
        let text = self.blocks[block as usize].text.take().expect("a block is kept for its text");
        self.texts.remove(&text);
        Some(block)
    }

    /// The text of the first block of `tokens` that `table` does not cover, if there is a whole one and at least one
    /// token beyond it.
    pub fn next_text(&self, table: &BlockTable, tokens: &[u32]) -> Option<Text> {
        let start = table.known * BLOCK_SIZE;
        if !self.reuse || table.blocks.len() != table.known || tokens.len() <= start + BLOCK_SIZE {
            return None;
        }
        Some(table.text(&tokens[start..]))
    }

    /// Extends `table`, of whose blocks all are full, by the blocks that hold what comes next in `tokens`, but never
    /// the last token, which has to be computed. Returns how many tokens more are in the cache.
    pub fn share(&mut self, table: &mut BlockTable, tokens: &[u32]) -> usize {
        let before = table.blocks.len();
        while let Some(&(node, number)) = self.next_text(table, tokens).and_then(|text| self.texts.get(&text)) {
            let block = &mut self.blocks[number as usize];
            if block.users == 0 {
                let holding = self.tenants.entry(table.tenant).or_default();
                holding.kept.remove(&block.released);
                holding.used += 1;
                self.kept -= 1;
            }
            block.users += 1;
            table.blocks.push(number);
            (table.node, table.known) = (node, table.known + 1);
        }
        (table.blocks.len() - before) * BLOCK_SIZE
    }

    /// Makes the blocks known that `tokens`, all in the cache, have filled.
    pub fn fill(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        while self.reuse && tokens.len() >= (table.known + 1) * BLOCK_SIZE {
            let text = table.text(&tokens[table.known * BLOCK_SIZE..]);
            let number = table.blocks[table.known];
            // Of two sequences that computed the same text at the same time, one is known; the other goes on under the
            // same node.
            table.node = match self.texts.get(&text) {
                Some(&(node, _)) => node,
                None => {
                    self.nodes += 1;
                    let text = Arc::new(text);
                    self.blocks[number as usize].text = Some(text.clone());
                    self.texts.insert(text, (self.nodes, number));
                    self.nodes
                }
            };
            table.known += 1;
        }
    }

    /// Takes all blocks of `table` back. Those whose text is known are kept until another sequence needs the memory.
    /// The end of a text goes first.
    pub fn release(&mut self, table: &mut BlockTable) {
        let BlockTable { tenant, blocks, .. } = std::mem::replace(table, BlockTable::new(table.tenant));
        let holding = self.tenants.entry(tenant).or_default();
        for number in blocks.into_iter().rev() {
            let block = &mut self.blocks[number as usize];
            block.users -= 1;
            if block.users > 0 {
                continue;
            }
            holding.used -= 1;
            if block.text.is_none() {
                self.free.push(number);
                continue;
            }
            self.clock += 1;
            block.released = self.clock;
            holding.kept.insert(self.clock, number);
            self.kept += 1;
        }
        self.tenants.retain(|_, holding| holding.blocks() > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::random::Random;

    /// A sequence whose `tokens` are all computed.
    fn computed(pool: &mut BlockPool, tokens: &[u32]) -> (BlockTable, usize) {
        computed_for(pool, Tenant::default(), tokens)
    }

    fn computed_for(pool: &mut BlockPool, tenant: Tenant, tokens: &[u32]) -> (BlockTable, usize) {
        let mut table = BlockTable::new(tenant);
        let shared = pool.share(&mut table, tokens);
        assert!(pool.grow(&mut table, tokens.len()));
        pool.fill(&mut table, tokens);
        (table, shared)
    }

    fn text(n: usize, seed: u32) -> Vec<u32> {
        (0..n as u32).map(|i| i * 7 + seed).collect()
    }

    #[test]
    fn texts_that_begin_alike_share_blocks() {
        let mut pool = BlockPool::new(8).reusing(true);
        let first = text(200, 0);
        let (mut a, shared) = computed(&mut pool, &first);
        assert_eq!((shared, a.len()), (0, 4));
        let mut second = first.clone();
        second[130] = 99;
        let (mut b, shared) = computed(&mut pool, &second);
        assert_eq!((shared, &b[..2]), (128, &a[..2]));
        assert_ne!(b[2], a[2]);
        pool.release(&mut a);
        pool.release(&mut b);
        assert_eq!(
            (pool.free_blocks(), pool.kept_blocks()),
            (8, 4),
            "three full blocks of the first, one more of the second"
        );
        assert_eq!(computed(&mut pool, &first).1, 192);
    }

    #[test]
    fn the_last_token_is_always_computed() {
        let mut pool = BlockPool::new(8).reusing(true);
        let (mut a, _) = computed(&mut pool, &text(128, 0));
        pool.release(&mut a);
        assert_eq!(computed(&mut pool, &text(128, 0)).1, 64);
        assert_eq!(computed(&mut pool, &text(129, 0)).1, 128);
    }

    #[test]
    fn the_least_recently_used_goes_first_and_ends_before_beginnings() {
        let mut pool = BlockPool::new(5).reusing(true);
        let (mut old, _) = computed(&mut pool, &text(129, 0));
        let (mut young, _) = computed(&mut pool, &text(65, 1));
        assert!(!pool.grow(&mut BlockTable::default(), 1), "all five are held");
        pool.release(&mut old);
        pool.release(&mut young);
        computed(&mut pool, &text(100, 2)); // takes the two that are known for nothing
        computed(&mut pool, &text(20, 3)); // takes the end of the oldest
        assert_eq!(pool.kept_blocks(), 2);
        assert_eq!(pool.share(&mut BlockTable::default(), &text(129, 0)), 64);
        assert_eq!(pool.share(&mut BlockTable::default(), &text(65, 1)), 64);
    }

    #[test]
    fn two_tenants_share_no_block() {
        let (anna, bert) = (Tenant(1), Tenant(2));
        let mut pool = BlockPool::new(16).reusing(true);
        let tokens = text(200, 0);
        let (mut a, _) = computed_for(&mut pool, anna, &tokens);
        let (mut b, shared) = computed_for(&mut pool, bert, &tokens);
        assert_eq!(shared, 0);
        assert!(b.iter().all(|block| !a.contains(block)), "{a:?} {b:?}");
        pool.release(&mut a);
        assert_eq!(pool.share(&mut BlockTable::default(), &tokens), 0, "nor with those who have no name");
        assert_eq!(pool.share(&mut a, &tokens), 192, "a table that was given back is still Anna's");
        pool.release(&mut a);
        pool.release(&mut b);
        assert_eq!((pool.kept_blocks(), pool.tenants.len()), (6, 2));
        assert_eq!((computed_for(&mut pool, anna, &tokens).1, computed_for(&mut pool, bert, &tokens).1), (192, 192));
    }

    #[test]
    fn who_floods_the_cache_pushes_out_what_is_its_own() {
        let (anna, bert) = (Tenant(1), Tenant(2));
        let mut pool = BlockPool::new(12).reusing(true);
        let (mut a, _) = computed_for(&mut pool, anna, &text(129, 0));
        pool.release(&mut a);
        for seed in 1..50 {
            let (mut b, _) = computed_for(&mut pool, bert, &text(300, seed));
            pool.release(&mut b);
        }
        assert_eq!(computed_for(&mut pool, anna, &text(129, 0)).1, 128);
        // A running sequence needs the memory: then no block is kept.
        let mut table = BlockTable::new(bert);
        assert!(pool.grow(&mut table, 9 * BLOCK_SIZE) && !pool.grow(&mut table, 10 * BLOCK_SIZE));
    }

    #[test]
    fn tenants_who_come_and_go_leave_nothing_behind() {
        for reuse in [true, false] {
            let mut pool = BlockPool::new(4).reusing(reuse);
            for tenant in 0..100 {
                let (mut table, _) = computed_for(&mut pool, Tenant(tenant), &text(65, tenant));
                pool.release(&mut table);
            }
            assert!(pool.tenants.len() <= 4 && pool.free_blocks() == 4, "{:?}", pool.tenants);
        }
    }

    #[test]
    fn without_reuse_nothing_is_kept() {
        let mut pool = BlockPool::new(4);
        let (mut a, _) = computed(&mut pool, &text(129, 0));
        pool.release(&mut a);
        assert_eq!((pool.kept_blocks(), computed(&mut pool, &text(129, 0)).1), (0, 0));
    }

    /// Random sequences come, grow and go: every block is held by as many as hold it, and what is shared is the same
    /// text.
    #[test]
    fn blocks_are_counted_and_hold_what_they_are_known_for() {
        let mut random = Random(11);
        let mut below = move |n: usize| (random.uniform() * n as f64) as usize;
        let mut pool = BlockPool::new(24).reusing(true);
        let mut contents: Vec<Vec<u32>> = vec![Vec::new(); 24]; // what was last computed into each block
        let mut owners = [Tenant::default(); 24];
        let mut live: Vec<(BlockTable, Vec<u32>)> = Vec::new();
        for _ in 0..5000 {
            if below(3) == 0 && !live.is_empty() {
                let (mut table, _) = live.swap_remove(below(live.len()));
                pool.release(&mut table);
            } else {
                // Few different blocks, so that beginnings are often alike.
                let tokens: Vec<u32> =
                    (0..1 + below(5)).flat_map(|_| vec![below(2) as u32; BLOCK_SIZE]).chain([7]).collect();
                let mut table = BlockTable::new(Tenant(below(3) as u32));
                let shared = pool.share(&mut table, &tokens);
                if !pool.grow(&mut table, tokens.len()) {
                    pool.release(&mut table);
                    continue;
                }
                for (i, chunk) in tokens.chunks(BLOCK_SIZE).enumerate() {
                    let block = table[i] as usize;
                    if i * BLOCK_SIZE >= shared {
                        (contents[block], owners[block]) = (chunk.to_vec(), table.tenant);
                    }
                    assert_eq!((&contents[block][..], owners[block]), (chunk, table.tenant));
                }
                pool.fill(&mut table, &tokens);
                live.push((table, tokens));
            }
            let mut users = vec![0; 24];
            live.iter().flat_map(|(table, _)| table.iter()).for_each(|&b| users[b as usize] += 1);
            assert!(pool.blocks.iter().zip(&users).all(|(block, &users)| block.users == users));
            assert_eq!(pool.free_blocks(), users.iter().filter(|&&n| n == 0).count());
            let held = |count: fn(&Holding) -> usize| pool.tenants.values().map(count).sum::<usize>();
            assert_eq!((held(|h| h.used), held(|h| h.kept.len())), (24 - pool.free_blocks(), pool.kept_blocks()));
            for (table, tokens) in &live {
                assert!(tokens.chunks(BLOCK_SIZE).zip(table.iter()).all(|(chunk, &b)| contents[b as usize] == chunk));
            }
        }
    }
}

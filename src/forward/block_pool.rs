//! Blocks of the KV cache, handed out to sequences, and the texts whose keys and values they hold.
//!
//! A full block is keyed by the text up to its end. Sequences of the same tenant with the same prefix share it. It
//! stays after its sequence has ended, until another sequence needs the memory.
//!
//! Where layers have recurrent state, keys and values alone are no beginning: a sequence can go on only where the state
//! was kept, too. So a text is known for what can be done with it:
//!
//! ```text
//! text      "system"  "user"  "answer"          each a node, with the block that holds it
//! state         #0               #1             snapshots, at the ends of blocks
//! leads_to       2      1         1             snapshots here and beyond: at 0 the block is of no use
//! ```
//!
//! [`BlockPool::share`] goes down the texts and says from which snapshot to restore, [`BlockPool::keep_state`] says
//! into which to save. Either side may run out of memory: a text that is forgotten takes its snapshot along, a snapshot
//! that is given up takes the blocks along that led to nothing else.
//!
//! Beside a GPU there may be a second tier: blocks on the host, to which a text goes before it is forgotten, and from
//! which it comes back when a sequence shares it. [`BlockPool::take_moves`] says what is copied, in that order, before
//! the next pass.
//!
//! ```text
//! snapshots  which of them there are, and which goes first
//! ```

mod snapshots;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::backend::batch::BLOCK_SIZE;
use snapshots::Snapshots;

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

/// What there is of a text.
#[derive(Debug)]
struct Known {
    text: Arc<Text>,
    place: Place,          // of its end
    snapshot: Option<u32>, // the state at its end
    leads_to: u32,         // snapshots at its end and beyond
}

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Device(u32),
    Host { block: u32, since: u64 }, // its key in `Holding::on_host`
}

/// A block's keys and values are copied, in all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockMove {
    /// From a block of the device to one of the host.
    ToHost(u32, u32),
    /// From a block of the host to one of the device.
    ToDevice(u32, u32),
}

/// The blocks of one sequence, from its position 0 on.
#[derive(Debug, Default)]
pub struct BlockTable {
    tenant: Tenant,
    blocks: Vec<u32>,
    node: u64, // of the text of the first `known` blocks
    known: usize,
    moving: Option<u64>, // the node whose snapshot is given up at the next one
}

impl BlockTable {
    /// No blocks yet, for a sequence of `tenant`.
    pub fn new(tenant: Tenant) -> Self {
        Self { tenant, ..Self::default() }
    }

    /// Tokens whose text is known.
    pub fn known_tokens(&self) -> usize {
        self.known * BLOCK_SIZE
    }

    /// Whose text it is.
    pub fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// The text of the block after node `before`, whose `tokens` these are, the block's own first.
    fn text(&self, before: u64, tokens: &[u32]) -> Text {
        let tokens = tokens[..BLOCK_SIZE].try_into().expect("a block's tokens");
        Text { tenant: self.tenant, before, tokens }
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
    users: u32,    // sequences that hold it
    node: u64,     // of the text that it is known by
    released: u64, // its key in `Holding::kept`, once no sequence holds it
}

/// The blocks of one tenant.
#[derive(Debug, Default)]
struct Holding {
    used: usize,                 // sequences hold them
    kept: BTreeMap<u64, u32>,    // no sequence holds them, but their text is known; least recently used first
    on_host: BTreeMap<u64, u64>, // the nodes of those on the host; least recently used first
}

impl Holding {
    fn blocks(&self) -> usize {
        self.used + self.kept.len()
    }
}

/// What sequences that begin alike share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Nothing.
    None,
    /// Blocks.
    Blocks,
    /// Blocks, up to where the state was kept, too, of which there is room for so many.
    States(usize),
}

/// How long a snapshot is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// As long as it is useful.
    ForOthers,
    /// The same, but if nobody has used it, only until the sequence's next one.
    UntilTheNext,
}

/// What a sequence takes of what others have computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shared {
    /// Tokens more that are in the cache.
    pub tokens: usize,
    /// The state at their end, where there is state.
    pub snapshot: Option<u32>,
    /// Tokens from the sequence's first on whose text is known, whether it can go on from there or not.
    pub known_tokens: usize,
}

/// Hands out blocks; a block is the same index in every layer.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    free: Vec<u32>, // of no use to anyone
    tenants: BTreeMap<Tenant, Holding>,
    kept: usize, // of all tenants
    free_on_host: Vec<u32>,
    host_blocks: usize,
    moves: Vec<BlockMove>,          // since they were last taken
    texts: HashMap<Arc<Text>, u64>, // -> its node
    nodes: HashMap<u64, Known>,
    last_node: u64,
    clock: u64,
    sharing: Sharing,
    snapshots: Snapshots,
}

impl BlockPool {
    /// `total` free blocks.
    pub fn new(total: usize) -> Self {
        Self {
            blocks: std::iter::repeat_with(Block::default).take(total).collect(),
            free: (0..total as u32).rev().collect(),
            tenants: BTreeMap::new(),
            kept: 0,
            free_on_host: Vec::new(),
            host_blocks: 0,
            moves: Vec::new(),
            texts: HashMap::new(),
            nodes: HashMap::new(),
            last_node: ROOT,
            clock: 0,
            sharing: Sharing::None,
            snapshots: Snapshots::default(),
        }
    }

    /// The same, but texts that begin alike share what `sharing` says.
    pub fn sharing(self, sharing: Sharing) -> Self {
        let snapshots = if let Sharing::States(count) = sharing { Snapshots::new(count) } else { self.snapshots };
        Self { sharing, snapshots, ..self }
    }

    /// The same with room for so many blocks more on the host.
    pub fn with_host(self, host_blocks: usize) -> Self {
        Self { host_blocks, free_on_host: (0..host_blocks as u32).rev().collect(), ..self }
    }

    /// What has to be copied before the next pass, in this order.
    pub fn take_moves(&mut self) -> impl Iterator<Item = BlockMove> {
        self.moves.drain(..)
    }

    /// Whether sequences go on from snapshots.
    pub fn keeps_states(&self) -> bool {
        matches!(self.sharing, Sharing::States(_))
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

    /// Blocks on the host.
    pub fn blocks_on_host(&self) -> usize {
        self.host_blocks - self.free_on_host.len()
    }

    /// Snapshots that sequences can go on from.
    pub fn kept_states(&self) -> usize {
        self.snapshots.len()
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
    /// another that holds fewer. Its text goes to the host, where there is room for any.
    fn forget(&mut self) -> Option<u32> {
        let keepers = self.tenants.values().filter(|holding| !holding.kept.is_empty());
        let holding = keepers.max_by_key(|holding| {
            (holding.blocks(), holding.kept.first_key_value().map(|(&released, _)| Reverse(released)))
        })?;
        let (_, &block) = holding.kept.first_key_value()?;
        let node = self.blocks[block as usize].node;
        if self.host_blocks > 0 {
            self.put_on_host(node, block);
        } else {
            self.lose(node);
        }
        self.free.pop()
    }

    /// Frees the kept block `block` of the device for one of the host.
    fn put_on_host(&mut self, node: u64, block: u32) {
        let oldest = |holding: &Holding| holding.on_host.first_key_value().map(|(&since, &node)| (since, node));
        if self.free_on_host.is_empty()
            && let Some(holding) =
                self.tenants.values().max_by_key(|holding| (holding.on_host.len(), oldest(holding).map(Reverse)))
            && let Some((_, oldest)) = oldest(holding)
        {
            self.lose(oldest);
        }
        // What led to the text that was lost alone has gone with it.
        let Some(known) = self.nodes.get_mut(&node) else { return };
        // All of the host may be on its way to the device.
        let Some(host) = self.free_on_host.pop() else { return self.lose(node) };
        self.clock += 1;
        known.place = Place::Host { block: host, since: self.clock };
        let of_block = &mut self.blocks[block as usize];
        of_block.node = ROOT;
        let holding = self.tenants.get_mut(&known.text.tenant).expect("it holds the block");
        holding.kept.remove(&of_block.released).expect("no sequence holds the block");
        holding.on_host.insert(self.clock, node);
        self.kept -= 1;
        self.free.push(block);
        self.moves.push(BlockMove::ToHost(block, host));
    }

    /// Forgets a text that no sequence holds, its snapshot, and what is of no use without it.
    fn lose(&mut self, node: u64) {
        if !self.keeps_states() {
            return self.discard(node);
        }
        let known = self.nodes.get_mut(&node).expect("a text that is known");
        let all = known.leads_to;
        if let Some(snapshot) = known.snapshot.take() {
            self.snapshots.remove(snapshot);
        }
        self.lead_to_fewer(node, all);
    }

    /// Whether a sequence holds the block of a text.
    fn is_held(&self, known: &Known) -> bool {
        matches!(known.place, Place::Device(block) if self.blocks[block as usize].users > 0)
    }

    /// Forgets the text of a block that no sequence holds, and frees the block.
    fn discard(&mut self, node: u64) {
        let Known { text, place, .. } = self.nodes.remove(&node).expect("a text that is known");
        self.texts.remove(&text);
        let holding = self.tenants.get_mut(&text.tenant).expect("it holds the block");
        match place {
            Place::Device(block) => {
                let of_block = &mut self.blocks[block as usize];
                of_block.node = ROOT;
                holding.kept.remove(&of_block.released).expect("no sequence holds the block");
                self.kept -= 1;
                self.free.push(block);
            }
            Place::Host { block, since } => {
                holding.on_host.remove(&since);
                self.free_on_host.push(block);
            }
        }
    }

    /// The text of the first block of `tokens` that `table` does not cover, if there is a whole one and at least one
    /// token beyond it.
    pub fn next_text(&self, table: &BlockTable, tokens: &[u32]) -> Option<Text> {
        self.text_after(table, table.known, table.node, tokens)
    }

    /// The same after `known` blocks, which node `before` ends.
    fn text_after(&self, table: &BlockTable, known: usize, before: u64, tokens: &[u32]) -> Option<Text> {
        let start = known * BLOCK_SIZE;
        if self.sharing == Sharing::None || table.blocks.len() != table.known || tokens.len() <= start + BLOCK_SIZE {
            return None;
        }
        Some(table.text(before, &tokens[start..]))
    }

    /// Extends `table`, of whose blocks all are full, by the blocks that hold what comes next in `tokens`, but never
    /// the last token, which has to be computed. What is on the host comes to the device if blocks are free for it.
    pub fn share(&mut self, table: &mut BlockTable, tokens: &[u32]) -> Shared {
        // What is known of the text, and how much of that the sequence can go on from.
        let (mut path, mut usable) = (Vec::new(), 0);
        let (mut before, mut room) = (table.node, self.free_blocks());
        let mut fits = true;
        while let Some(text) = self.text_after(table, table.known + path.len(), before, tokens)
            && let Some(&node) = self.texts.get(&text)
        {
            path.push(node);
            before = node;
            let known = &self.nodes[&node];
            fits = fits && (self.is_held(known) || room > 0);
            room -= usize::from(fits && !self.is_held(known));
            if fits && (!self.keeps_states() || known.snapshot.is_some()) {
                usable = path.len();
            }
        }
        let known_tokens = (table.known + path.len()) * BLOCK_SIZE;
        path.truncate(usable);
        // None of them makes room for another.
        for &node in &path {
            match self.nodes[&node].place {
                Place::Device(number) => self.hold(table.tenant, number),
                Place::Host { since, .. } => {
                    self.tenants.entry(table.tenant).or_default().on_host.remove(&since);
                }
            }
        }
        for &node in &path {
            let number = match self.nodes[&node].place {
                Place::Device(number) => number,
                Place::Host { block, .. } => self.bring(node, block),
            };
            table.blocks.push(number);
            (table.node, table.known) = (node, table.known + 1);
        }
        let snapshot = path.last().and_then(|node| self.nodes[node].snapshot);
        if let Some(snapshot) = snapshot {
            self.snapshots.touch(snapshot);
        }
        Shared { tokens: path.len() * BLOCK_SIZE, snapshot, known_tokens }
    }

    /// One more sequence of `tenant` holds a block of the device.
    fn hold(&mut self, tenant: Tenant, number: u32) {
        let block = &mut self.blocks[number as usize];
        if block.users == 0 {
            let holding = self.tenants.entry(tenant).or_default();
            holding.kept.remove(&block.released);
            holding.used += 1;
            self.kept -= 1;
        }
        block.users += 1;
    }

    /// Brings a text from a block of the host to one of the device, for one sequence.
    fn bring(&mut self, node: u64, from: u32) -> u32 {
        let number = self.free.pop().or_else(|| self.forget()).expect("counted before");
        self.moves.push(BlockMove::ToDevice(from, number));
        self.free_on_host.push(from);
        let block = &mut self.blocks[number as usize];
        (block.users, block.node) = (1, node);
        let known = self.nodes.get_mut(&node).expect("a text that is known");
        known.place = Place::Device(number);
        self.tenants.entry(known.text.tenant).or_default().used += 1;
        number
    }

    /// Makes the blocks known that `tokens`, all in the cache, have filled.
    pub fn fill(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        while self.sharing != Sharing::None && tokens.len() >= (table.known + 1) * BLOCK_SIZE {
            let text = table.text(table.node, &tokens[table.known * BLOCK_SIZE..]);
            let block = table.blocks[table.known];
            // Of two sequences that computed the same text at the same time, one is known; the other goes on under the
            // same node.
            table.node = match self.texts.get(&text) {
                Some(&node) => {
                    self.take_the_place_of_the_host(node, block);
                    node
                }
                None => {
                    self.last_node += 1;
                    let text = Arc::new(text);
                    self.blocks[block as usize].node = self.last_node;
                    self.texts.insert(text.clone(), self.last_node);
                    let known = Known { text, place: Place::Device(block), snapshot: None, leads_to: 0 };
                    self.nodes.insert(self.last_node, known);
                    self.last_node
                }
            };
            table.known += 1;
        }
    }

    /// A text that is on the host was computed again, into `number`: the host need not keep it.
    fn take_the_place_of_the_host(&mut self, node: u64, number: u32) {
        let known = self.nodes.get_mut(&node).expect("a text that is known");
        if let Place::Host { block, since } = known.place {
            known.place = Place::Device(number);
            self.tenants.entry(known.text.tenant).or_default().on_host.remove(&since);
            self.blocks[number as usize].node = node;
            self.free_on_host.push(block);
        }
    }

    /// A snapshot for the state at the end of what is known of `table`; the one that moves on with it is given up,
    /// unless another sequence has gone on from it. `None`: there is one here already, or no room for any.
    pub fn keep_state(&mut self, table: &mut BlockTable, keep: Keep) -> Option<u32> {
        if let Some(node) = table.moving.take()
            && let Some(snapshot) = self.nodes.get(&node).and_then(|known| known.snapshot)
            && !self.snapshots.was_used(snapshot)
        {
            self.give_up_state(node);
        }
        if self.nodes.get(&table.node)?.snapshot.is_some() {
            return None;
        }
        if self.snapshots.is_full() {
            let node = self.snapshots.least_useful()?;
            self.give_up_state(node);
        }
        let leads_on = self.nodes.get(&table.node)?.leads_to > 0;
        let (mut above, mut up) = (None, table.node);
        while let Some(known) = self.nodes.get_mut(&up) {
            known.leads_to += 1;
            above = above.or(known.snapshot);
            up = known.text.before;
        }
        let snapshot = self.snapshots.add(table.tenant, table.node, table.known * BLOCK_SIZE, above);
        self.nodes.get_mut(&table.node)?.snapshot = Some(snapshot);
        if leads_on {
            let Self { nodes, snapshots, .. } = self;
            snapshots.put_above(snapshot, &|mut node| {
                // A text's node is younger than that of the text before it.
                while node > table.node
                    && let Some(known) = nodes.get(&node)
                {
                    node = known.text.before;
                }
                node == table.node
            });
        }
        if keep == Keep::UntilTheNext {
            table.moving = Some(table.node);
        }
        Some(snapshot)
    }

    /// Gives up the snapshot at `node`, if there is one.
    fn give_up_state(&mut self, node: u64) {
        if let Some(snapshot) = self.nodes.get_mut(&node).and_then(|known| known.snapshot.take()) {
            self.snapshots.remove(snapshot);
            self.lead_to_fewer(node, 1);
        }
    }

    /// Counts `fewer` snapshots less for a text and those before it. Blocks that lead to none any more and that no
    /// sequence holds are freed.
    fn lead_to_fewer(&mut self, node: u64, fewer: u32) {
        let mut up = node;
        while let Some(known) = self.nodes.get_mut(&up) {
            let node = std::mem::replace(&mut up, known.text.before);
            known.leads_to -= fewer;
            let is_held = matches!(known.place, Place::Device(block) if self.blocks[block as usize].users > 0);
            if known.leads_to == 0 && !is_held {
                self.discard(node);
            }
        }
    }

    /// Takes all blocks of `table` back. Those whose text is known are kept until another sequence needs the memory.
    /// The end of a text goes first.
    pub fn release(&mut self, table: &mut BlockTable) {
        let BlockTable { tenant, blocks, .. } = std::mem::replace(table, BlockTable::new(table.tenant));
        for number in blocks.into_iter().rev() {
            let block = &mut self.blocks[number as usize];
            block.users -= 1;
            if block.users > 0 {
                continue;
            }
            let holding = self.tenants.entry(tenant).or_default();
            holding.used -= 1;
            let Some(known) = self.nodes.get(&block.node) else {
                self.free.push(number);
                continue;
            };
            let leads_nowhere = matches!(self.sharing, Sharing::States(_)) && known.leads_to == 0;
            self.clock += 1;
            block.released = self.clock;
            holding.kept.insert(self.clock, number);
            self.kept += 1;
            if leads_nowhere {
                let node = block.node;
                self.discard(node);
            }
        }
        self.tenants.retain(|_, holding| holding.blocks() > 0 || !holding.on_host.is_empty());
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
        let shared = pool.share(&mut table, tokens).tokens;
        assert!(pool.grow(&mut table, tokens.len()));
        pool.fill(&mut table, tokens);
        (table, shared)
    }

    fn text(n: usize, seed: u32) -> Vec<u32> {
        (0..n as u32).map(|i| i * 7 + seed).collect()
    }

    #[test]
    fn texts_that_begin_alike_share_blocks() {
        let mut pool = BlockPool::new(8).sharing(Sharing::Blocks);
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
        let mut pool = BlockPool::new(8).sharing(Sharing::Blocks);
        let (mut a, _) = computed(&mut pool, &text(128, 0));
        pool.release(&mut a);
        assert_eq!(computed(&mut pool, &text(128, 0)).1, 64);
        assert_eq!(computed(&mut pool, &text(129, 0)).1, 128);
    }

    #[test]
    fn the_least_recently_used_goes_first_and_ends_before_beginnings() {
        let mut pool = BlockPool::new(5).sharing(Sharing::Blocks);
        let (mut old, _) = computed(&mut pool, &text(129, 0));
        let (mut young, _) = computed(&mut pool, &text(65, 1));
        assert!(!pool.grow(&mut BlockTable::default(), 1), "all five are held");
        pool.release(&mut old);
        pool.release(&mut young);
        computed(&mut pool, &text(100, 2)); // takes the two that are known for nothing
        computed(&mut pool, &text(20, 3)); // takes the end of the oldest
        assert_eq!(pool.kept_blocks(), 2);
        assert_eq!(pool.share(&mut BlockTable::default(), &text(129, 0)).tokens, 64);
        assert_eq!(pool.share(&mut BlockTable::default(), &text(65, 1)).tokens, 64);
    }

    #[test]
    fn two_tenants_share_no_block() {
        let (anna, bert) = (Tenant(1), Tenant(2));
        let mut pool = BlockPool::new(16).sharing(Sharing::Blocks);
        let tokens = text(200, 0);
        let (mut a, _) = computed_for(&mut pool, anna, &tokens);
        let (mut b, shared) = computed_for(&mut pool, bert, &tokens);
        assert_eq!(shared, 0);
        assert!(b.iter().all(|block| !a.contains(block)), "{a:?} {b:?}");
        pool.release(&mut a);
        assert_eq!(pool.share(&mut BlockTable::default(), &tokens).tokens, 0, "nor with those who have no name");
        assert_eq!(pool.share(&mut a, &tokens).tokens, 192, "a table that was given back is still Anna's");
        pool.release(&mut a);
        pool.release(&mut b);
        assert_eq!((pool.kept_blocks(), pool.tenants.len()), (6, 2));
        assert_eq!((computed_for(&mut pool, anna, &tokens).1, computed_for(&mut pool, bert, &tokens).1), (192, 192));
    }

    #[test]
    fn who_floods_the_cache_pushes_out_what_is_its_own() {
        let (anna, bert) = (Tenant(1), Tenant(2));
        let mut pool = BlockPool::new(12).sharing(Sharing::Blocks);
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
        for sharing in [Sharing::Blocks, Sharing::None, Sharing::States(2)] {
            let mut pool = BlockPool::new(4).sharing(sharing);
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
    /// text, also when it was on the host meanwhile.
    #[test]
    fn blocks_are_counted_and_hold_what_they_are_known_for() {
        for (sharing, host) in [
            (Sharing::Blocks, 0),
            (Sharing::Blocks, 3),
            (Sharing::Blocks, 40),
            (Sharing::States(6), 3),
            (Sharing::States(6), 40),
        ] {
            check_blocks(BlockPool::new(24).sharing(sharing).with_host(host), sharing, host);
        }
    }

    fn check_blocks(mut pool: BlockPool, sharing: Sharing, host: usize) {
        let mut random = Random(11);
        let mut below = move |n: usize| (random.uniform() * n as f64) as usize;
        // What was last computed into each block, by whom, and what was copied to the host.
        let mut contents = vec![(Tenant::default(), Vec::<u32>::new()); 24];
        let mut on_host = vec![(Tenant::default(), Vec::new()); host];
        let mut live: Vec<(BlockTable, Vec<u32>)> = Vec::new();
        let mut brought = 0;
        for _ in 0..5000 {
            if below(3) == 0 && !live.is_empty() {
                let (mut table, _) = live.swap_remove(below(live.len()));
                pool.release(&mut table);
            } else {
                // Few different blocks, so that beginnings are often alike.
                let tokens: Vec<u32> =
                    (0..1 + below(5)).flat_map(|_| vec![below(2) as u32; BLOCK_SIZE]).chain([7]).collect();
                let mut table = BlockTable::new(Tenant(below(3) as u32));
                let shared = pool.share(&mut table, &tokens).tokens;
                let grown = pool.grow(&mut table, tokens.len());
                for moved in pool.take_moves() {
                    match moved {
                        BlockMove::ToHost(block, host) => on_host[host as usize] = contents[block as usize].clone(),
                        BlockMove::ToDevice(host, block) => {
                            contents[block as usize] = on_host[host as usize].clone();
                            brought += 1;
                        }
                    }
                }
                if !grown {
                    pool.release(&mut table);
                    continue;
                }
                for (i, chunk) in tokens.chunks(BLOCK_SIZE).enumerate() {
                    let of_block = &mut contents[table[i] as usize];
                    if i * BLOCK_SIZE >= shared {
                        *of_block = (table.tenant, chunk.to_vec());
                    }
                    assert_eq!((of_block.0, &of_block.1[..]), (table.tenant, chunk));
                }
                for end in (shared + BLOCK_SIZE..tokens.len()).step_by(BLOCK_SIZE) {
                    pool.fill(&mut table, &tokens[..end]);
                    if sharing != Sharing::Blocks && below(2) == 0 {
                        pool.keep_state(&mut table, Keep::ForOthers);
                    }
                }
                live.push((table, tokens));
            }
            let mut users = vec![0; 24];
            live.iter().flat_map(|(table, _)| table.iter()).for_each(|&b| users[b as usize] += 1);
            assert!(pool.blocks.iter().zip(&users).all(|(block, &users)| block.users == users));
            assert_eq!(pool.free_blocks(), users.iter().filter(|&&n| n == 0).count());
            let held = |count: fn(&Holding) -> usize| pool.tenants.values().map(count).sum::<usize>();
            assert_eq!((held(|h| h.used), held(|h| h.kept.len())), (24 - pool.free_blocks(), pool.kept_blocks()));
            assert_eq!(held(|h| h.on_host.len()), pool.blocks_on_host());
            let known_on_host = |known: &&Known| matches!(known.place, Place::Host { .. });
            assert_eq!(pool.nodes.values().filter(known_on_host).count(), pool.blocks_on_host());
            for (table, tokens) in &live {
                let blocks = tokens.chunks(BLOCK_SIZE).zip(table.iter());
                blocks.for_each(|(chunk, &b)| assert_eq!(contents[b as usize].1, chunk));
            }
        }
        assert_eq!(brought > 100, host > 0, "{sharing:?}, {host} blocks on the host: {brought} brought");
    }

    #[test]
    fn what_leaves_the_device_comes_back_from_the_host() {
        let mut pool = BlockPool::new(4).sharing(Sharing::Blocks).with_host(3);
        let (first, second) = (text(200, 0), text(256, 1));
        let (mut a, _) = computed(&mut pool, &first);
        let blocks = a.to_vec();
        pool.release(&mut a);
        let (mut b, _) = computed(&mut pool, &second);
        let moves: Vec<_> = pool.take_moves().collect();
        let of = |at: usize, host| BlockMove::ToHost(blocks[at], host);
        assert_eq!(moves, [of(2, 0), of(1, 1), of(0, 2)], "the end first");
        pool.release(&mut b);
        let mut a = BlockTable::default();
        // The first block that it takes has nowhere to go: the host is still full.
        assert_eq!((pool.share(&mut a, &first).tokens, pool.blocks_on_host()), (192, 2));
        let back: Vec<_> = pool.take_moves().filter(|moved| matches!(moved, BlockMove::ToDevice(..))).collect();
        assert_eq!(back.len(), 3);
    }

    /// The same of a model with recurrent state, whose state is kept after each of `at` tokens.
    fn computed_with_state(pool: &mut BlockPool, tokens: &[u32], at: &[usize]) -> (BlockTable, Shared) {
        let mut table = BlockTable::default();
        let shared = pool.share(&mut table, tokens);
        for &at in at.iter().chain([&tokens.len()]).filter(|&&at| at > shared.tokens) {
            assert!(pool.grow(&mut table, at));
            pool.fill(&mut table, &tokens[..at]);
            if at < tokens.len() {
                pool.keep_state(&mut table, Keep::ForOthers);
            }
        }
        (table, shared)
    }

    #[test]
    fn a_sequence_goes_on_where_the_state_was_kept() {
        let mut pool = BlockPool::new(20).sharing(Sharing::States(4));
        let first = text(400, 0);
        let (mut a, shared) = computed_with_state(&mut pool, &first, &[128, 256]);
        assert_eq!(shared, Shared::default());
        let mut second = first.clone();
        second[330] = 9;
        let (mut b, shared) = computed_with_state(&mut pool, &second, &[]);
        assert_eq!(shared, Shared { tokens: 256, snapshot: Some(1), known_tokens: 320 }, "the text is known to 320");
        pool.release(&mut a);
        pool.release(&mut b);
        assert_eq!((pool.kept_blocks(), pool.kept_states()), (4, 2), "what lies beyond is of no use to anyone");
        let mut third = first.clone();
        third[250] = 9;
        assert_eq!(pool.share(&mut BlockTable::default(), &third).tokens, 128);
        assert_eq!(pool.share(&mut BlockTable::default(), &text(400, 1)), Shared::default());
    }

    #[test]
    fn a_block_that_is_forgotten_takes_its_state_along() {
        let mut pool = BlockPool::new(6).sharing(Sharing::States(4));
        let (mut a, _) = computed_with_state(&mut pool, &text(257, 0), &[64, 256]);
        pool.release(&mut a);
        assert_eq!((pool.kept_blocks(), pool.kept_states()), (4, 2));
        let (mut b, _) = computed_with_state(&mut pool, &text(150, 1), &[]);
        assert_eq!((pool.kept_blocks(), pool.kept_states()), (1, 1), "three blocks led to the state at 256 alone");
        pool.release(&mut b);
        assert_eq!(pool.share(&mut BlockTable::default(), &text(257, 0)).tokens, 64);
    }

    #[test]
    fn the_state_of_an_answer_moves_on_with_it() {
        let mut pool = BlockPool::new(20).sharing(Sharing::States(8));
        let tokens = text(700, 0);
        let (mut a, _) = computed_with_state(&mut pool, &tokens[..130], &[128]);
        for end in (192..=640).step_by(64) {
            assert!(pool.grow(&mut a, end));
            pool.fill(&mut a, &tokens[..end]);
            assert!(pool.keep_state(&mut a, Keep::UntilTheNext).is_some());
            if end == 256 {
                assert_eq!(pool.share(&mut BlockTable::default(), &tokens[..300]).tokens, 256, "it is used from now");
            }
        }
        pool.release(&mut a);
        assert_eq!(pool.kept_states(), 3, "at 128, at 256 and at the end");
        assert_eq!(pool.share(&mut BlockTable::default(), &tokens).tokens, 640);
    }

    /// What would take longest to compute again stays, and the newest.
    #[test]
    fn snapshots_that_save_little_go_first() {
        let mut pool = BlockPool::new(100).sharing(Sharing::States(3));
        let (a, b) = (text(1000, 0), text(1000, 1));
        let (mut table, _) = computed_with_state(&mut pool, &a, &[64, 640, 704]);
        pool.release(&mut table);
        let (mut table, _) = computed_with_state(&mut pool, &b, &[320]);
        pool.release(&mut table);
        let shared = |pool: &mut BlockPool, tokens: &[u32]| {
            let mut table = BlockTable::default();
            let shared = pool.share(&mut table, tokens).tokens;
            pool.release(&mut table);
            shared
        };
        assert_eq!((pool.kept_states(), shared(&mut pool, &a), shared(&mut pool, &b)), (3, 704, 320));
        assert_eq!(shared(&mut pool, &a[..600]), 0, "64 tokens are soon read again");
    }

    /// Random sequences come, grow and go: states lead to what is counted, and nothing is kept that is of no use.
    #[test]
    fn states_are_counted() {
        let mut random = Random(12);
        let mut below = move |n: usize| (random.uniform() * n as f64) as usize;
        let mut pool = BlockPool::new(24).sharing(Sharing::States(5));
        let mut live: Vec<BlockTable> = Vec::new();
        let mut hits = 0;
        for _ in 0..20_000 {
            if below(3) == 0 && !live.is_empty() {
                pool.release(&mut live.swap_remove(below(live.len())));
            } else {
                let mut table = BlockTable::new(Tenant(below(2) as u32));
                let tokens: Vec<u32> =
                    (0..1 + below(6)).flat_map(|_| vec![below(2) as u32; BLOCK_SIZE]).chain([7]).collect();
                let shared = pool.share(&mut table, &tokens);
                assert_eq!(shared.tokens > 0, shared.snapshot.is_some());
                hits += usize::from(shared.tokens > 0);
                for end in (shared.tokens + BLOCK_SIZE..tokens.len()).step_by(BLOCK_SIZE) {
                    if !pool.grow(&mut table, end) {
                        break;
                    }
                    pool.fill(&mut table, &tokens[..end]);
                    match below(3) {
                        0 => drop(pool.keep_state(&mut table, Keep::ForOthers)),
                        1 => drop(pool.keep_state(&mut table, Keep::UntilTheNext)),
                        _ => {}
                    }
                }
                live.push(table);
            }
            let states = pool.nodes.values().filter(|known| known.snapshot.is_some()).count();
            assert_eq!(states, pool.kept_states());
            assert!(states <= 5 && pool.texts.len() == pool.nodes.len());
            for (&node, known) in &pool.nodes {
                let leads = |mut from: u64| {
                    while from > node && pool.nodes.contains_key(&from) {
                        from = pool.nodes[&from].text.before;
                    }
                    from == node
                };
                let beyond = pool.nodes.iter().filter(|(from, known)| known.snapshot.is_some() && leads(**from));
                assert_eq!(beyond.count(), known.leads_to as usize);
                if let Place::Device(block) = known.place {
                    assert_eq!(pool.blocks[block as usize].node, node);
                }
                assert!(pool.is_held(known) || known.leads_to > 0);
            }
            assert_eq!(pool.free_blocks(), pool.blocks.iter().filter(|block| block.users == 0).count());
        }
        assert!(hits > 1000, "{hits}");
    }
}

//! Which snapshots of recurrent state are kept, and which goes first.
//!
//! A snapshot is worth the tokens that would be read again without it: those since the snapshot above it on the same
//! text. It goes when the clock has come as far beyond its last use as it is worth, and each one that goes puts the
//! clock to where it stood itself. So of a long conversation the old ones between go first, the ones below them become
//! worth more, and what nobody comes back to goes in the end (GreedyDual; Cao and Irani, 1997).

use std::collections::BTreeMap;

use super::Tenant;

/// The snapshots that there is room for.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    all: Vec<Option<Snapshot>>,
    free: Vec<u32>,
    clock: u64, // in tokens
}

#[derive(Debug)]
struct Snapshot {
    tenant: Tenant,
    node: u64,          // the text that it stands at the end of
    tokens: usize,      // of that text
    above: Option<u32>, // the nearest one that a shorter beginning of the text ends at
    used: u64,          // where the clock stood
    was_used: bool,     // by another sequence than the one that left it
}

impl Snapshots {
    /// Room for `count`.
    pub(super) fn new(count: usize) -> Self {
        let all = std::iter::repeat_with(|| None).take(count).collect();
        Self { all, free: (0..count as u32).rev().collect(), clock: 0 }
    }

    /// Snapshots that are kept.
    pub(super) fn len(&self) -> usize {
        self.all.len() - self.free.len()
    }

    /// Whether one has to go before another can be added.
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    fn kept(&self) -> impl Iterator<Item = &Snapshot> {
        self.all.iter().flatten()
    }

    fn get(&mut self, snapshot: u32) -> &mut Snapshot {
        self.all[snapshot as usize].as_mut().expect("a snapshot that is kept")
    }

    /// Keeps one more, where there is room: at the end of a text of `tokens` tokens.
    pub(super) fn add(&mut self, tenant: Tenant, node: u64, tokens: usize, above: Option<u32>) -> u32 {
        let snapshot = self.free.pop().expect("the caller has made room");
        let used = self.clock;
        self.all[snapshot as usize] = Some(Snapshot { tenant, node, tokens, above, used, was_used: false });
        snapshot
    }

    /// `snapshot` is now the nearest one above those whose texts `leads` says it leads to.
    pub(super) fn put_above(&mut self, snapshot: u32, leads: &dyn Fn(u64) -> bool) {
        let Snapshot { above, tokens, .. } = *self.get(snapshot);
        for other in self.all.iter_mut().flatten() {
            if other.above == above && other.tokens > tokens && leads(other.node) {
                other.above = Some(snapshot);
            }
        }
    }

    /// A sequence goes on from it.
    pub(super) fn touch(&mut self, snapshot: u32) {
        let clock = self.clock;
        let of = self.get(snapshot);
        (of.used, of.was_used) = (clock, true);
    }

    /// Whether a sequence has gone on from it.
    pub(super) fn was_used(&self, snapshot: u32) -> bool {
        self.all[snapshot as usize].as_ref().is_some_and(|snapshot| snapshot.was_used)
    }

    /// Forgets one.
    pub(super) fn remove(&mut self, snapshot: u32) {
        let Some(Snapshot { above, .. }) = self.all[snapshot as usize].take() else { return };
        self.free.push(snapshot);
        for other in self.all.iter_mut().flatten().filter(|other| other.above == Some(snapshot)) {
            other.above = above;
        }
    }

    /// The node of the one that should go first: of the tenant that keeps the most.
    pub(super) fn least_useful(&mut self) -> Option<u64> {
        let mut of_tenants = BTreeMap::<Tenant, usize>::new();
        self.kept().for_each(|snapshot| *of_tenants.entry(snapshot.tenant).or_default() += 1);
        let (tenant, _) = of_tenants.into_iter().max_by_key(|&(_, count)| count)?;
        let until = |snapshot: &Snapshot| {
            let above = snapshot.above.and_then(|above| self.all[above as usize].as_ref());
            snapshot.used + (snapshot.tokens - above.map_or(0, |above| above.tokens)) as u64
        };
        let of_tenant = self.kept().filter(|snapshot| snapshot.tenant == tenant);
        let (until, node) = of_tenant.map(|snapshot| (until(snapshot), snapshot.node)).min()?;
        self.clock = self.clock.max(until);
        Some(node)
    }
}

//! Where the bytes of the routed experts are: mapped as the cache file lies, or copied into huge pages, a slice per
//! NUMA node.
//!
//! With several nodes every one holds a slice of every expert, cut by tiles of rows: whatever experts a token goes to,
//! it reads from all memories at once. A mapped file is one slice, wherever its pages happen to be.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use moebius_cache::format::ExpertCache;
use moebius_cache::pack::ExpertLayout;
#[cfg(feature = "cuda")]
use moebius_cache::pack::TilePart;

#[cfg(feature = "cuda")]
use crate::cuda::{Registered, Runs};
use crate::machine::heap::Heap;
use crate::machine::memory::{self, Buffer};
use crate::machine::topology;
use crate::machine::workers::{Shared, Team, Worker};
use crate::model::Share;
use crate::{Error, Result};

/// How many routed experts a model has, and how each is packed.
#[derive(Clone, Debug)]
pub struct ExpertShape {
    /// Of the experts of each MoE layer; they differ in their precision alone.
    pub layouts: Arc<[ExpertLayout]>,
    /// Experts of a layer.
    pub experts: usize,
}

impl ExpertShape {
    /// MoE layers.
    pub fn layers(&self) -> usize {
        self.layouts.len()
    }

    /// Numbers that an expert reads and writes.
    pub fn hidden(&self) -> usize {
        self.layouts[0].gate.k
    }

    /// The width of an expert.
    pub fn intermediate(&self) -> usize {
        self.layouts[0].down.k
    }

    /// What a rank has of every expert: a run of its width, and the shape of that. Errors: `Error::Invalid` where
    /// ranks are too many for the width.
    pub fn part(&self, share: Share) -> Result<(Self, Range<usize>)> {
        let width = self.intermediate();
        let unit = self.layouts.iter().map(ExpertLayout::width_unit).max().unwrap_or(1);
        if share.is_whole() {
            return Ok((self.clone(), 0..width));
        }
        if !width.is_multiple_of(unit) || width / unit < share.of {
            return Err(Error::Invalid(format!(
                "experts of width {width} are cut in steps of {unit}, which is too few for {} GPUs: give fewer GPUs, \
                 or --experts int4 --group-size 32",
                share.of
            )));
        }
        let run = share.run(width / unit);
        let run = run.start * unit..run.end * unit;
        let layouts = self.layouts.iter().map(|layout| layout.of_width(run.clone()));
        Ok((Self { layouts: layouts.collect::<moebius_cache::Result<_>>()?, experts: self.experts }, run))
    }

    /// Bytes of the largest expert: what one of any layer has room in.
    pub fn most_bytes(&self) -> usize {
        self.layouts.iter().map(ExpertLayout::bytes).max().unwrap_or(0)
    }

    /// Bytes of one expert of every layer.
    pub fn bytes_of_one(&self) -> u64 {
        self.layouts.iter().map(|layout| layout.bytes() as u64).sum()
    }
}

/// All packed routed experts of a model.
pub struct ExpertMemory {
    cache: Arc<ExpertCache>, // the bytes themselves while there is no copy
    gate: Vec<usize>,        // [nodes + 1]: the first tile of each node's slice
    down: Vec<usize>,        // [nodes + 1]
    copy: Vec<Slice>,        // [nodes], or empty: mapped
    wanted: Vec<AtomicBool>, // [layers, experts]: their pages were asked for
}

/// What one node holds: of every expert a run of `gate` and `up` tiles, then a run of `down` tiles.
struct Slice {
    layers: Vec<(usize, usize)>, // where each begins, and bytes from one expert of it to the next
    bytes: Buffer<u8>,           // [layers][experts, stride]
}

impl ExpertMemory {
    /// The experts where they are: a mapped file, or memory that the cache itself owns.
    pub fn mapped(cache: Arc<ExpertCache>) -> Self {
        Self::cut(cache, &[1])
    }

    /// The experts copied into huge pages by the team, checksums compared on the way: a slice for each of its nodes, in
    /// that node's memory; or, if `interleave` names nodes, one slice whose pages alternate between them.
    ///
    /// Where memory is short, the copy frees its source: pages of the file, or random weights without another holder.
    /// `progress(layers done, layers)`. Errors: `Error::Resources` when there is no memory, `Error::Cache` for a
    /// damaged expert.
    pub fn copied(
        cache: Arc<ExpertCache>,
        team: &Team,
        interleave: &[usize],
        progress: &dyn Fn(usize, usize),
    ) -> Result<Self> {
        let workers = if interleave.is_empty() { team.threads_per_node() } else { vec![team.threads()] };
        let mut memory = Self::cut(cache, &workers);
        let (layers, experts) = (memory.cache.num_layers(), memory.cache.num_experts());
        for node in 0..workers.len() {
            let mut all = 0;
            let mut place = |layout: &ExpertLayout| {
                let bytes = 2 * memory.gate_tiles_of(node).len() * layout.gate.tile_bytes()
                    + memory.down_tiles_of(node).len() * layout.down.tile_bytes();
                let (at, stride) = (all, bytes.next_multiple_of(64));
                all += experts * stride;
                (at, stride)
            };
            let places = memory.cache.layouts().iter().map(&mut place).collect();
            let buffer = Heap::default().buffer(&[all])?;
            // Refused in some containers: then pages go to the node of the thread that writes them first, which is
            // right too.
            let _ = match team.nodes() {
                _ if !interleave.is_empty() => buffer.interleave(interleave),
                [_] => Ok(()),
                nodes => buffer.prefer(0..buffer.len(), nodes[node]),
            };
            memory.copy.push(Slice { layers: places, bytes: buffer });
        }
        // Pages of the file fill a node's memory before the copy can: with several nodes they always go.
        let keep = workers.len() == 1 && topology::available_bytes() > 2 * memory.cache.header().file_bytes();
        for layer in 0..layers {
            memory.copy_layer(layer, team)?;
            if let (false, Some(cache)) = (keep && memory.cache.is_file(), Arc::get_mut(&mut memory.cache)) {
                cache.forget_layer(layer);
            }
            progress(layer + 1, layers);
        }
        Ok(memory)
    }

    /// Cuts every expert in proportion to the workers of each node.
    fn cut(cache: Arc<ExpertCache>, workers: &[usize]) -> Self {
        let layout = cache.layout(0); // tiles are those of all layers
        let all: usize = workers.iter().sum();
        let bounds = |tiles: usize| {
            let mut before = 0;
            let ends = workers.iter().map(|n| {
                before += n;
                tiles * before / all
            });
            std::iter::once(0).chain(ends).collect()
        };
        let all = cache.num_layers() * cache.num_experts();
        let wanted = (0..all).map(|_| AtomicBool::new(false)).collect();
        let (gate, down) = (bounds(layout.gate.tiles()), bounds(layout.down.tiles()));
        Self { gate, down, cache, copy: Vec::new(), wanted }
    }

    fn copy_layer(&mut self, layer: usize, team: &Team) -> Result<()> {
        let Self { cache, gate, down, copy, .. } = self;
        let layout = cache.layout(layer);
        let (nodes, experts) = (copy.len(), cache.num_experts());
        let claims: Vec<AtomicUsize> = (0..nodes).map(|_| AtomicUsize::new(0)).collect();
        let places: Vec<(usize, usize)> = copy.iter().map(|slice| slice.layers[layer]).collect();
        let to: Vec<Shared<'_, u8>> = copy.iter_mut().map(|slice| Shared::new(&mut slice.bytes)).collect();
        let failed = Mutex::new(None);
        let copy_slice = |node: usize, expert: usize| {
            // One node's worker checks the whole expert, just before it takes its part of it.
            if expert % nodes == node
                && let Err(error) = cache.check_expert(layer, expert)
            {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
            let from = cache.expert(layer, expert);
            let gate_up = &from[layout.gate_tile(gate[node])..layout.gate_tile(gate[node + 1])];
            let down = &from[layout.down_tile(down[node])..layout.down_tile(down[node + 1])];
            let at = places[node].0 + expert * places[node].1;
            // SAFETY: each (node, expert) is claimed once.
            let to = unsafe { to[node].slice_mut(at..at + gate_up.len() + down.len()) };
            to[..gate_up.len()].copy_from_slice(gate_up);
            to[gate_up.len()..].copy_from_slice(down);
        };
        team.run(&|worker: &Worker<'_>| {
            for node in turns(worker.node, nodes) {
                // Pages go to the node of the thread that writes them first. The caller, on node 0, may not be pinned
                // yet.
                let pinned = || worker.count_on(node) - usize::from(node == 0);
                if nodes > 1 && (node != worker.node || worker.index == 0) && pinned() > 0 {
                    continue;
                }
                while let Some(expert) = Some(claims[node].fetch_add(1, Relaxed)).filter(|&expert| expert < experts) {
                    copy_slice(node, expert);
                }
            }
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }

    /// The header, names and checksums of the experts; their bytes are only good where there is no copy.
    pub fn cache(&self) -> &ExpertCache {
        &self.cache
    }

    /// What the experts were, or still are, read from.
    pub fn into_cache(self) -> Arc<ExpertCache> {
        self.cache
    }

    /// Slices: NUMA nodes that hold a part of every expert, in the order of [`Team::nodes`]; 1 when mapped.
    pub fn nodes(&self) -> usize {
        self.gate.len() - 1
    }

    /// Whether the experts are a copy in anonymous memory.
    pub fn is_copy(&self) -> bool {
        !self.copy.is_empty()
    }

    /// The tiles of `gate` and of `up` that a node holds.
    pub fn gate_tiles_of(&self, node: usize) -> Range<usize> {
        self.gate[node]..self.gate[node + 1]
    }

    /// The tiles of `down` that a node holds.
    pub fn down_tiles_of(&self, node: usize) -> Range<usize> {
        self.down[node]..self.down[node + 1]
    }

    /// Tiles of `gate` and `up`, alternating, in one run of bytes. Panics: the tiles are not all of one node (a bug).
    pub fn gate_up_tiles(&self, layer: usize, expert: usize, tiles: Range<usize>) -> &[u8] {
        self.assert_wanted(layer, expert);
        let layout = self.cache.layout(layer);
        let len = 2 * tiles.len() * layout.gate.tile_bytes();
        if self.copy.is_empty() {
            return &self.cache.expert(layer, expert)[layout.gate_tile(tiles.start)..][..len];
        }
        let node = node_of(&self.gate, &tiles);
        &self.slice(node, layer, expert)[layout.gate_tile(tiles.start - self.gate[node])..][..len]
    }

    /// Tiles of `down` in one run of bytes. Panics: the tiles are not all of one node (a bug).
    pub fn down_tiles(&self, layer: usize, expert: usize, tiles: Range<usize>) -> &[u8] {
        self.assert_wanted(layer, expert);
        let layout = self.cache.layout(layer);
        let bytes = layout.down.tile_bytes();
        if self.copy.is_empty() {
            return &self.cache.expert(layer, expert)[layout.down_tile(tiles.start)..][..tiles.len() * bytes];
        }
        let node = node_of(&self.down, &tiles);
        let first = layout.gate_tile(self.gate_tiles_of(node).len()) + (tiles.start - self.down[node]) * bytes;
        &self.slice(node, layer, expert)[first..][..tiles.len() * bytes]
    }

    fn slice(&self, node: usize, layer: usize, expert: usize) -> &[u8] {
        let Slice { layers, bytes } = &self.copy[node];
        let (at, stride) = layers[layer];
        &bytes[at + expert * stride..][..stride]
    }

    /// Some experts of a layer in the order of the cache file, one after the other at a stride of
    /// their size: `put(offset, bytes)` is called with each run of bytes and where it belongs, in
    /// bytes from the first expert.
    pub fn each_run<'a>(&'a self, layer: usize, experts: Range<usize>, mut put: impl FnMut(usize, &'a [u8])) {
        let layout = self.cache.layout(layer);
        let stride = layout.bytes();
        match &self.copy[..] {
            [] => put(0, &self.cache.layer(layer)[experts.start * stride..experts.end * stride]),
            [Slice { layers, bytes }] => {
                put(0, &bytes[layers[layer].0 + experts.start * stride..][..experts.len() * stride]);
            }
            slices => {
                for (i, expert) in experts.enumerate() {
                    for node in 0..slices.len() {
                        let (gate, down) = (self.gate_tiles_of(node), self.down_tiles_of(node));
                        put(i * stride + layout.gate_tile(gate.start), self.gate_up_tiles(layer, expert, gate));
                        put(i * stride + layout.down_tile(down.start), self.down_tiles(layer, expert, down));
                    }
                }
            }
        }
    }

    /// The bytes of a part of an expert's width, as an expert of that part alone has them: `put(where, runs)` is
    /// called with what lies together, and where it belongs in `part`, which is [`ExpertShape::part`]'s. Of each tile
    /// of `down` these are `down_parts`.
    #[cfg(feature = "cuda")]
    pub fn each_part<'a>(
        &'a self,
        (layer, expert): (usize, usize),
        (part, width, down_parts): (&ExpertLayout, &Range<usize>, &[TilePart]),
        mut put: impl FnMut(usize, Runs<'a>),
    ) {
        self.want(layer, [expert]);
        let layout = self.cache.layout(layer);
        let tile = |at: usize| at * layout.gate.tiles() / layout.down.k;
        for node in 0..self.nodes() {
            let (gate, down) = (self.gate_tiles_of(node), self.down_tiles_of(node));
            let own = gate.start.max(tile(width.start))..gate.end.min(tile(width.end));
            if !own.is_empty() {
                let from = self.gate_up_tiles(layer, expert, own.clone());
                let (pitch, bytes) = (from.len(), from.len());
                let runs = Runs { from, from_pitch: pitch, to_pitch: pitch, bytes, count: 1 };
                put(part.gate_tile(own.start - tile(width.start)), runs);
            }
            if down.is_empty() {
                continue;
            }
            let from = self.down_tiles(layer, expert, down.clone());
            for TilePart { from: at, to, bytes } in down_parts {
                let (from_pitch, to_pitch) = (layout.down.tile_bytes(), part.down.tile_bytes());
                let runs = Runs { from: &from[*at..], from_pitch, to_pitch, bytes: *bytes, count: down.len() };
                put(part.down_tile(down.start) + to, runs);
            }
        }
    }

    /// What it holds.
    pub fn shape(&self) -> ExpertShape {
        ExpertShape { layouts: self.cache.layouts().into(), experts: self.cache.num_experts() }
    }

    /// The memory that holds the experts, as it is mapped.
    pub fn regions(&self) -> Vec<&[u8]> {
        if self.is_copy() {
            return self.copy.iter().map(|slice| &*slice.bytes).collect();
        }
        (0..self.cache.num_layers()).map(|layer| self.cache.layer(layer)).collect()
    }

    /// Pins the experts where they lie. Not pinned is slower, not wrong: some systems allow it for no memory of files.
    #[cfg(feature = "cuda")]
    pub fn pin(&self) -> Vec<Registered> {
        self.regions().into_iter().map_while(|region| Registered::new(region, !self.is_copy()).ok()).collect()
    }

    /// From the first byte of `first` to the last one of `last`, two runs of it; `None`: they do not lie in one piece.
    #[cfg(feature = "cuda")]
    pub fn between<'a>(&'a self, first: &[u8], last: &[u8]) -> Option<&'a [u8]> {
        let (start, end) = (first.as_ptr().addr(), last.as_ptr().addr() + last.len());
        let within = |region: &'a [u8]| {
            let begin = region.as_ptr().addr();
            region.get(start.checked_sub(begin)?..end.checked_sub(begin)?)
        };
        self.regions().into_iter().find_map(within)
    }

    /// Announces that the bytes of these experts are read next; every reader calls this first, some a layer ahead.
    ///
    /// The first call for a mapped expert asks the system for its pages. Later calls do nothing.
    pub fn want(&self, layer: usize, experts: impl IntoIterator<Item = usize>) {
        let wanted = &self.wanted[layer * self.cache.num_experts()..][..self.cache.num_experts()];
        for expert in experts {
            // A load first: a store would take the cache line from the other cores.
            if !wanted[expert].load(Relaxed) && !wanted[expert].swap(true, Relaxed) && !self.is_copy() {
                self.cache.will_need(layer, expert);
            }
        }
    }

    fn assert_wanted(&self, layer: usize, expert: usize) {
        debug_assert!(
            self.is_copy() || self.wanted[layer * self.cache.num_experts() + expert].load(Relaxed),
            "expert {expert} of layer {layer} is read before it is wanted"
        );
    }

    /// The experts of a layer that were ever [`want`](ExpertMemory::want)ed.
    #[cfg(test)]
    pub(super) fn wanted(&self, layer: usize) -> Vec<usize> {
        let experts = self.cache.num_experts();
        (0..experts).filter(|expert| self.wanted[layer * experts + expert].load(Relaxed)).collect()
    }

    /// Compares an expert with its checksum, where that was not done while copying. Errors: `Error::Cache` when it is
    /// damaged.
    pub fn check_expert(&self, layer: usize, expert: usize) -> Result<()> {
        self.assert_wanted(layer, expert);
        match self.is_copy() {
            true => Ok(()),
            false => Ok(self.cache.check_expert(layer, expert)?),
        }
    }

    /// Keeps the experts in memory: never paged out, and read in now. Errors: the limit of locked memory is too low.
    pub fn lock(&self) -> Result<()> {
        if !self.is_copy() {
            return Ok(self.cache.lock()?);
        }
        self.copy.iter().try_for_each(|slice| slice.bytes.lock()).map_err(|e| {
            let kib = self.bytes().div_ceil(1024);
            Error::Invalid(format!(
                "cannot lock the experts in memory ({e}): raise the limit with `ulimit -l {kib}`, or run without \
                 --lock"
            ))
        })
    }

    /// Bytes of all experts.
    pub fn bytes(&self) -> u64 {
        self.cache.num_experts() as u64 * self.shape().bytes_of_one()
    }

    /// The share of sampled pages of each slice that are on the node they should be on, from 0 to 1; `nodes` as
    /// [`Team::nodes`].
    ///
    /// `None` where the system does not tell.
    pub fn placed(&self, nodes: &[usize]) -> Option<Vec<f64>> {
        let share = |(slice, &node): (&Slice, &usize)| {
            let pages = memory::nodes_of(&slice.bytes, 256)?;
            let right = pages.iter().filter(|&&at| at == node as i32).count();
            Some(right as f64 / pages.len().max(1) as f64)
        };
        self.copy.iter().zip(nodes).map(share).collect()
    }
}

/// A node's own slice first, then the others', so that no worker is idle while there is work.
fn turns(own: usize, nodes: usize) -> impl Iterator<Item = usize> {
    (0..nodes).map(move |i| (own + i) % nodes)
}

/// The node that holds `tiles`, which are at least one.
fn node_of(bounds: &[usize], tiles: &Range<usize>) -> usize {
    let node = bounds.partition_point(|&first| first <= tiles.start) - 1;
    assert!(tiles.end <= bounds[node + 1], "tiles {tiles:?} are on more than one node");
    node
}

#[cfg(test)]
mod tests;

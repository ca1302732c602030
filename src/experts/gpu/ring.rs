//! Experts that pass through VRAM: crossing PCIe on a stream of their own while others are used.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::GpuExperts;
use super::parts::Parts;
use super::products::{Choices, LayerInput, Products};
use crate::Result;
use crate::cuda::{Address, Cuda, CudaEvent, DeviceBuffer};
use crate::experts::ExpertShape;

/// Two halves of VRAM that experts pass through: one is filled while the other is used.
pub(super) struct Ring {
    cuda: Arc<Cuda>,
    shape: ExpertShape,
    bytes: DeviceBuffer<u8>,   // [2, half, bytes of the largest]
    half: usize,               // experts of a half
    tables: DeviceBuffer<u64>, // [2, experts]
    pub(super) filled: [CudaEvent; 2],
    pub(super) used: [CudaEvent; 2],
    pub(super) holds: [Option<ExpertRun>; 2],
    newest: usize,     // the half that was filled last
    copied_bytes: u64, // since the start
}

/// Experts of a layer that cross together: a run of those that are [`not_in_vram`] here.
///
/// [`not_in_vram`]: crate::experts::residency::Residency::not_in_vram
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ExpertRun {
    pub(super) layer: usize,
    pub(super) ranks: Range<usize>,
}

impl Ring {
    /// Room for `half` experts twice.
    pub(super) fn new(cuda: &Arc<Cuda>, shape: &ExpertShape, half: usize) -> Result<Self> {
        let events = || Ok::<_, crate::Error>([CudaEvent::new(cuda)?, CudaEvent::new(cuda)?]);
        Ok(Self {
            bytes: DeviceBuffer::new(cuda, 2 * half * shape.most_bytes())?,
            half,
            tables: DeviceBuffer::zeros(cuda, 2 * shape.experts)?,
            filled: events()?,
            used: events()?,
            holds: [None, None],
            newest: 1,
            copied_bytes: 0,
            cuda: cuda.clone(),
            shape: shape.clone(),
        })
    }

    /// Bytes that have crossed since the start.
    pub(super) fn copied_bytes(&self) -> u64 {
        self.copied_bytes
    }

    /// What `streamed` experts of a layer are cut into.
    pub(super) fn parts(&self, layer: usize, streamed: usize) -> impl Iterator<Item = ExpertRun> + use<> {
        let half = self.half.max(1);
        (0..streamed).step_by(half).map(move |from| ExpertRun { layer, ranks: from..streamed.min(from + half) })
    }

    /// The half that holds a part, or that it should come to: they alternate.
    pub(super) fn half_of(&self, part: &ExpertRun) -> usize {
        self.holds.iter().position(|held| held.as_ref() == Some(part)).unwrap_or(1 - self.newest)
    }

    pub(super) fn holds(&self, part: &ExpertRun) -> bool {
        self.holds.iter().flatten().any(|held| held == part)
    }

    /// Other experts of this layer are in RAM now: what its parts were is no longer so.
    pub(super) fn forget(&mut self, layer: usize) {
        self.holds.iter_mut().filter(|held| held.as_ref().is_some_and(|h| h.layer == layer)).for_each(|h| *h = None);
    }

    /// Enqueues the copies of experts of `layer`, in ascending order, into a half, and its table: their addresses over
    /// those of `table`.
    pub(super) fn copy(
        &mut self,
        parts: &Parts,
        half: usize,
        (layer, experts): (usize, &[usize]),
        mut table: Vec<u64>,
    ) {
        let Self { cuda, shape, .. } = &*self;
        let bytes = shape.layouts[layer].bytes();
        cuda.wait(&cuda.copy, &self.used[half]);
        let to = self.bytes.address().add(half * self.half * shape.most_bytes());
        parts.upload(cuda, layer, experts, to);
        for (i, &expert) in experts.iter().enumerate() {
            table[expert] = to.add(i * bytes).to_u64();
        }
        cuda.upload(&cuda.copy, self.table(half), &table);
        cuda.record(&self.filled[half], &cuda.copy);
        self.newest = half;
        self.copied_bytes += (experts.len() * parts.whole_bytes(layer)) as u64;
    }

    pub(super) fn table(&self, half: usize) -> Address<u64> {
        self.tables.address().add(half * self.shape.experts)
    }
}

/// A ring for those experts of each layer that somebody lists.
pub(super) struct Crossing {
    ring: Ring,
    experts: Vec<Vec<usize>>, // [layers]: ascending
}

impl Crossing {
    /// Room for `half` experts twice.
    pub(super) fn new(cuda: &Arc<Cuda>, shape: &ExpertShape, half: usize) -> Result<Self> {
        Ok(Self { ring: Ring::new(cuda, shape, half)?, experts: vec![Vec::new(); shape.layers()] })
    }

    /// Lists those of a layer, in any order.
    pub(super) fn list(&mut self, layer: usize, experts: impl IntoIterator<Item = usize>) {
        let mut experts: Vec<usize> = experts.into_iter().collect();
        experts.sort_unstable();
        experts.dedup();
        if self.experts[layer] != experts {
            self.ring.forget(layer);
            self.experts[layer] = experts;
        }
    }

    /// Bytes that have crossed since the start.
    pub(super) fn copied_bytes(&self) -> u64 {
        self.ring.copied_bytes
    }

    /// Whether some of a layer are listed.
    pub(super) fn is_listed(&self, layer: usize) -> bool {
        !self.experts[layer].is_empty()
    }

    /// Marks them in a table of the layer's experts.
    pub(super) fn mark(&self, layer: usize, table: &mut [u64]) {
        self.experts[layer].iter().for_each(|&expert| table[expert] = 1);
    }

    /// `y` of the listed experts of a layer, each part while the next is on its way, and with the first of them that of
    /// experts at the addresses `beside`.
    pub(super) fn multiply(
        &mut self,
        (parts, products): (&Parts, &Products),
        x: Address<bf16>,
        choices: Choices,
        beside: impl Fn(usize) -> Vec<u64>,
    ) {
        let (layer, cuda) = (choices.layer, self.ring.cuda.clone());
        let runs: Vec<ExpertRun> = self.ring.parts(layer, self.experts[layer].len()).collect();
        let of_next = self.experts.get(layer + 1).map_or(0, Vec::len);
        let next_layer = self.ring.parts(layer + 1, of_next).next();
        for (i, now) in runs.iter().enumerate() {
            let next = runs.get(i + 1).or(next_layer.as_ref());
            let half = self.ring.half_of(now);
            self.fill(parts, half, now, &beside);
            if let Some(next) = next.filter(|next| !self.ring.holds(next)) {
                self.fill(parts, 1 - half, next, &beside);
            }
            cuda.wait(&cuda.compute, &self.ring.filled[half]);
            products.grouped(&cuda.compute, self.ring.table(half), x, choices, Address::NULL);
            cuda.record(&self.ring.used[half], &cuda.compute);
        }
    }

    /// Enqueues the copies of a part into a half of the ring, unless they are there.
    fn fill(&mut self, parts: &Parts, half: usize, part: &ExpertRun, beside: &impl Fn(usize) -> Vec<u64>) {
        if self.ring.holds[half].as_ref() == Some(part) {
            return;
        }
        let ExpertRun { layer, ranks } = part.clone();
        let table = if ranks.start == 0 { beside(layer) } else { vec![0; self.ring.shape.experts] };
        self.ring.copy(parts, half, (layer, &self.experts[layer][ranks]), table);
        self.ring.holds[half] = Some(part.clone());
    }
}

impl GpuExperts {
    /// Enqueues the copies of a part into a half of the ring, unless they are there.
    fn fill(&mut self, half: usize, part: ExpertRun) -> Result<()> {
        if self.ring.holds[half].as_ref() == Some(&part) {
            return Ok(());
        }
        let ExpertRun { layer, ranks } = part.clone();
        let with_residents = ranks.start == 0;
        let mut experts: Vec<usize> =
            self.together.residency().not_in_vram(layer)[ranks].iter().map(|&e| e as usize).collect();
        experts.sort_unstable();
        self.copy(half, layer, &experts, with_residents)?;
        self.ring.holds[half] = Some(part);
        Ok(())
    }

    /// Enqueues the copies of experts of `layer`, in ascending order, into a half of the ring. Residents are computed
    /// with the first of a layer.
    fn copy(&mut self, half: usize, layer: usize, experts: &[usize], with_residents: bool) -> Result<()> {
        if self.parts.share().rank == 0 {
            self.cpu.check_layer(layer)?; // of all ranks: a damaged expert ends the pass
        }
        let table = match with_residents {
            true => self.residents.addresses(self.together.residency(), layer).collect(),
            false => vec![0; self.experts()],
        };
        self.ring.copy(&self.parts, half, (layer, experts), table);
        Ok(())
    }

    /// Streams experts of a layer and computes `y` with them and with the residents. `counted`: choices already are.
    pub(super) fn stream(&mut self, streamed: usize, input: &LayerInput<'_>, counted: bool) -> Result<()> {
        let layer = input.layer;
        let is_last = layer + 1 == self.together.residency().layers();
        let tokens = input.routing.tokens();
        let of_next = if is_last { 0 } else { self.crossing(tokens, layer + 1).own };
        if !is_last {
            // From the file while this layer's cross.
            let next = &self.together.residency().in_ram(layer + 1)[..self.streamed(tokens, layer + 1)];
            self.memory.want(layer + 1, next.iter().map(|&expert| expert as usize));
        }
        let mut parts = self.ring.parts(layer, streamed);
        let mut part = parts.next();
        while let Some(now) = part {
            let half = self.ring.half_of(&now);
            self.fill(half, now)?;
            // What comes next is on its way while this is computed.
            part = parts.next();
            let first = || self.ring.parts(layer + 1, of_next).next();
            if let Some(next) = part.clone().or_else(first)
                && !self.ring.holds(&next)
            {
                self.fill(1 - half, next)?;
            }
            self.multiply(half, input, counted);
        }
        Ok(())
    }

    /// As [`stream`](GpuExperts::stream), but only those of the `streamed` that some token chose cross: for few tokens
    /// waiting for the routing costs less than copies that no token needs.
    pub(super) fn stream_chosen(&mut self, streamed: usize, input: &LayerInput<'_>, counted: bool) -> Result<()> {
        let layer = input.layer;
        let mut ids = Vec::new();
        input.routing.read_ids(&mut ids)?;
        let chosen: HashSet<i32> = ids.into_iter().collect();
        let candidates = &self.together.residency().not_in_vram(layer)[..streamed];
        let mut experts: Vec<usize> =
            candidates.iter().filter(|&&e| chosen.contains(&i32::from(e))).map(|&e| e as usize).collect();
        experts.sort_unstable();
        // Once at least, for the residents.
        for i in 0..experts.len().div_ceil(self.ring.half).max(1) {
            let (half, from) = (i % 2, i * self.ring.half);
            self.ring.holds[half] = None;
            self.copy(half, layer, &experts[from..experts.len().min(from + self.ring.half)], i == 0)?;
            self.multiply(half, input, counted);
        }
        Ok(())
    }

    /// `y` of the experts in a half of the ring, once they are there.
    fn multiply(&self, half: usize, input: &LayerInput<'_>, counted: bool) {
        self.cuda.wait(&self.cuda.compute, &self.ring.filled[half]);
        let used = if counted { Address::NULL } else { self.counts(input.layer) };
        self.products.grouped(&self.cuda.compute, self.ring.table(half), input.x.bf16(), Choices::from(input), used);
        self.cuda.record(&self.ring.used[half], &self.cuda.compute);
    }
}

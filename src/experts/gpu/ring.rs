//! Experts that pass through VRAM: crossing PCIe on a stream of their own while others are used.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use super::GpuExperts;
use crate::Result;
use crate::backend::cuda::{CudaRouting, Tensor};
use crate::cuda::{Address, Cuda, DeviceBuffer, Event};

/// Two halves of VRAM that experts pass through: one is filled while the other is used.
pub(super) struct Ring {
    bytes: DeviceBuffer<u8>,   // [2, half, stride]
    half: usize,               // experts of a half
    tables: DeviceBuffer<u64>, // [2, experts]
    filled: [Event; 2],
    used: [Event; 2],
    holds: [Option<(usize, Range<usize>)>; 2], // layer, and places in its order
}

impl Ring {
    /// Room for `half` experts twice.
    pub(super) fn new(cuda: &Arc<Cuda>, half: usize, stride: usize, experts: usize) -> Result<Self> {
        let events = || Ok::<_, crate::Error>([Event::new(cuda)?, Event::new(cuda)?]);
        Ok(Self {
            bytes: DeviceBuffer::new(cuda, 2 * half * stride)?,
            half,
            tables: DeviceBuffer::zeros(cuda, 2 * experts)?,
            filled: events()?,
            used: events()?,
            holds: [None, None],
        })
    }

    /// The half that holds these experts, or that they should come to.
    fn slot(&self, layer: usize, places: &Range<usize>, halves: usize) -> usize {
        let held = self.holds.iter().position(|holds| holds.as_ref() == Some(&(layer, places.clone())));
        // The one that was filled longer ago: they alternate.
        held.unwrap_or_else(|| {
            let newest = |i: usize| self.holds[i].as_ref().map_or(0, |(l, p)| (l * halves.max(1) + p.start) + 1);
            usize::from(newest(1) < newest(0))
        })
    }

    /// What was said of this layer's places is no longer so.
    pub(super) fn forget(&mut self, layer: usize) {
        self.holds
            .iter_mut()
            .filter(|held| held.as_ref().is_some_and(|(l, _)| *l == layer))
            .for_each(|held| *held = None);
    }
}

impl GpuExperts {
    /// A table of `layer` that is not 0 for residents and for `streamed` others.
    pub(super) fn marks(&mut self, layer: usize, streamed: usize) -> Result<Address<u64>> {
        if self.marks.as_ref().is_none_or(|(n, _)| *n != streamed) {
            let mut marks = vec![0u64; self.layers * self.experts];
            for (layer, order) in self.order.iter().enumerate() {
                for &expert in &order[..self.sizes.resident + streamed] {
                    marks[layer * self.experts + expert as usize] = 1;
                }
            }
            // A pass that still runs reads the old one.
            self.cuda.synchronize()?;
            self.marks = Some((streamed, DeviceBuffer::from_slice(&self.cuda, &marks)?));
        }
        Ok(self.marks.as_ref().map_or(Address::NULL, |(_, marks)| marks.address().add(layer * self.experts)))
    }

    /// Enqueues the copies of some experts of `layer` into half `slot` of the ring, unless they are there.
    fn fill(&mut self, slot: usize, layer: usize, places: Range<usize>) -> Result<()> {
        if self.ring.holds[slot].as_ref() == Some(&(layer, places.clone())) {
            return Ok(());
        }
        let mut numbers: Vec<usize> = self.order[layer][places.clone()].iter().map(|&expert| expert as usize).collect();
        numbers.sort_unstable();
        // Residents are computed with the first half.
        self.copy(slot, layer, &numbers, places.start == self.sizes.resident)?;
        self.ring.holds[slot] = Some((layer, places));
        Ok(())
    }

    /// Enqueues the copies of experts of `layer`, in ascending order, into half `slot` of the ring, and its table, with
    /// residents in it or not.
    fn copy(&mut self, slot: usize, layer: usize, numbers: &[usize], with_residents: bool) -> Result<()> {
        if !self.checked[layer] {
            self.cpu.check_layer(layer)?;
            self.checked[layer] = true;
        }
        let Self { cuda, ring, memory, .. } = self;
        let (stride, experts) = (memory.stride(), self.experts);
        cuda.wait(&cuda.copy, &ring.used[slot]);
        let mut table = vec![0u64; experts];
        let mut to = ring.bytes.address().add(slot * ring.half * stride);
        // Neighbours in the file cross together.
        for run in numbers.chunk_by(|a, b| a + 1 == *b) {
            memory.each_run(layer, run[0]..run[0] + run.len(), |offset, bytes| {
                cuda.upload(&cuda.copy, to.add(offset), bytes)
            });
            for &expert in run {
                table[expert] = to.to_u64();
                to = to.add(stride);
            }
        }
        if with_residents {
            let residents = &self.host_tables[layer * experts..(layer + 1) * experts];
            table.iter_mut().zip(residents).filter(|(_, resident)| **resident != 0).for_each(|(t, r)| *t = *r);
        }
        cuda.upload(&cuda.copy, ring.tables.address().add(slot * experts), &table);
        cuda.record(&ring.filled[slot], &cuda.copy);
        self.streamed_bytes += (numbers.len() * self.layout.bytes()) as u64;
        Ok(())
    }

    /// Halves that `streamed` experts of a layer take: the places in its order.
    fn halves(&self, streamed: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (first, end, half) = (self.sizes.resident, self.sizes.resident + streamed, self.ring.half);
        (first..end).step_by(half.max(1)).map(move |at| at..end.min(at + half))
    }

    /// Streams experts of `layer` and computes `y` with them and with the residents. `counted`: choices already are.
    pub(super) fn stream(
        &mut self,
        layer: usize,
        streamed: usize,
        x: &Tensor,
        routing: &CudaRouting,
        counted: bool,
    ) -> Result<()> {
        let count = self.halves(streamed).count();
        for (i, places) in self.halves(streamed).enumerate() {
            let slot = self.ring.slot(layer, &places, count);
            self.fill(slot, layer, places)?;
            // What comes next is on its way while this is computed.
            let next = self.halves(streamed).nth(i + 1).map(|places| (layer, places));
            let first =
                || self.halves(streamed).next().filter(|_| layer + 1 < self.layers).map(|places| (layer + 1, places));
            if let Some((layer, places)) = next.or_else(first)
                && !self.ring.holds.contains(&Some((layer, places.clone())))
            {
                self.fill(1 - slot, layer, places)?;
            }
            self.multiply(slot, layer, x, routing, counted);
        }
        Ok(())
    }

    /// As [`stream`](GpuExperts::stream), but only those of the `streamed` that some token chose cross: for few tokens
    /// waiting for the routing costs less than copies that nobody needs.
    pub(super) fn stream_chosen(
        &mut self,
        layer: usize,
        streamed: usize,
        x: &Tensor,
        routing: &CudaRouting,
        counted: bool,
    ) -> Result<()> {
        let mut ids = Vec::new();
        routing.read_ids(&mut ids)?;
        let chosen: HashSet<i32> = ids.into_iter().collect();
        let candidates = &self.order[layer][self.sizes.resident..self.sizes.resident + streamed];
        let mut numbers: Vec<usize> =
            candidates.iter().filter(|&&e| chosen.contains(&i32::from(e))).map(|&e| e as usize).collect();
        numbers.sort_unstable();
        // Once at least, for the residents.
        for i in 0..numbers.len().div_ceil(self.ring.half).max(1) {
            let (slot, from) = (i % 2, i * self.ring.half);
            self.ring.holds[slot] = None;
            self.copy(slot, layer, &numbers[from..numbers.len().min(from + self.ring.half)], i == 0)?;
            self.multiply(slot, layer, x, routing, counted);
        }
        Ok(())
    }

    /// `y` of the experts in half `slot` of the ring, once they are there.
    fn multiply(&self, slot: usize, layer: usize, x: &Tensor, routing: &CudaRouting, counted: bool) {
        self.cuda.wait(&self.cuda.compute, &self.ring.filled[slot]);
        let used = if counted { Address::NULL } else { self.counts(layer) };
        self.grouped(layer, self.ring.tables.address().add(slot * self.experts), x, routing, used);
        self.cuda.record(&self.ring.used[slot], &self.cuda.compute);
    }
}

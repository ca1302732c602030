//! Experts that live in VRAM, and the tables in which kernels look for them.

use std::sync::Arc;

use moebius_cache::pack::ExpertLayout;

use crate::Result;
use crate::cuda::{Address, Cuda, DeviceBuffer};
use crate::experts::residency::{Move, Place, Residency};
use crate::experts::{CpuExperts, ExpertMemory, ExpertShape};

/// The experts in VRAM, and where they are.
pub(super) struct Residents {
    cuda: Arc<Cuda>,
    experts: usize,
    slots: usize,
    layers: Vec<(usize, usize)>, // where each begins, and bytes of one of its experts
    bytes: DeviceBuffer<u8>,     // [layers][slots, bytes of an expert]
    tables: DeviceBuffer<u64>,   // [layers, experts]: addresses; 0: in RAM alone
    marks: Option<(usize, DeviceBuffer<u64>)>, // [layers, experts]: not 0 for those in VRAM and n others
}

impl Residents {
    /// Room for `slots` experts of each layer. Errors: `Error::Resources` where VRAM ends.
    pub(super) fn new(cuda: &Arc<Cuda>, shape: &ExpertShape, slots: usize) -> Result<Self> {
        let experts = shape.experts;
        let mut all = 0;
        let place = |layout: &ExpertLayout| {
            let at = all;
            all += slots * layout.bytes();
            (at, layout.bytes())
        };
        let layers: Vec<_> = shape.layouts.iter().map(place).collect();
        Ok(Self {
            cuda: cuda.clone(),
            experts,
            slots,
            bytes: DeviceBuffer::new(cuda, all)?,
            tables: DeviceBuffer::new(cuda, layers.len() * experts)?,
            layers,
            marks: None,
        })
    }

    /// Copies the experts that are to be in VRAM. Errors: `Error::Cache` for a damaged one.
    pub(super) fn fill(&self, cpu: &mut CpuExperts, residency: &Residency) -> Result<()> {
        let (residents, cuda, memory) = (self, &self.cuda, cpu.memory().clone());
        let mut tables = Vec::with_capacity(residency.layers() * self.experts);
        for layer in 0..residency.layers() {
            if residents.slots > 0 {
                cpu.check_layer(layer)?;
            }
            for (slot, &expert) in residency.in_vram(layer).iter().enumerate() {
                let to = residents.address(layer, slot);
                memory.each_run(layer, expert as usize..expert as usize + 1, |offset, bytes| {
                    cuda.upload(&cuda.copy, to.add(offset), bytes)
                });
            }
            tables.extend(residents.addresses(residency, layer));
        }
        cuda.upload(&cuda.copy, residents.tables.address(), &tables);
        cuda.synchronize()
    }

    fn address(&self, layer: usize, slot: usize) -> Address<u8> {
        let (at, bytes) = self.layers[layer];
        self.bytes.address().add(at + slot * bytes)
    }

    /// Where each expert of a layer is in VRAM; 0: it is not.
    pub(super) fn addresses(&self, residency: &Residency, layer: usize) -> impl Iterator<Item = u64> {
        (0..self.experts as u16).map(move |expert| match residency.place(layer, expert) {
            Place::Vram(slot) => self.address(layer, slot).to_u64(),
            Place::Ram => 0,
        })
    }

    /// [`addresses`](Residents::addresses) on the device.
    pub(super) fn table(&self, layer: usize) -> Address<u64> {
        self.tables.address().add(layer * self.experts)
    }

    /// A table of `layer` that is not 0 for experts in VRAM and for those that cross: the first `streamed` in RAM.
    pub(super) fn marks(&mut self, residency: &Residency, layer: usize, streamed: usize) -> Result<Address<u64>> {
        let row = layer * self.experts;
        if let Some((_, marks)) = self.marks.as_ref().filter(|(n, _)| *n == streamed) {
            return Ok(marks.address().add(row));
        }
        let mut marks = vec![0u64; residency.layers() * self.experts];
        for (layer, row) in marks.chunks_exact_mut(self.experts).enumerate() {
            let crossing = &residency.in_ram(layer)[..streamed];
            residency.in_vram(layer).iter().chain(crossing).for_each(|&expert| row[expert as usize] = 1);
        }
        // A pass that still runs reads the old one.
        self.cuda.synchronize()?;
        let (_, marks) = self.marks.insert((streamed, DeviceBuffer::from_slice(&self.cuda, &marks)?));
        Ok(marks.address().add(row))
    }

    /// Copies an expert to its slot, after a move. Its bytes and the new addresses come before the next pass in the
    /// compute stream.
    pub(super) fn replace(&mut self, memory: &ExpertMemory, residency: &Residency, Move { layer, slot, expert }: Move) {
        let (cuda, to) = (&self.cuda, self.address(layer, slot));
        memory.each_run(layer, expert as usize..expert as usize + 1, |offset, bytes| {
            cuda.upload(&cuda.compute, to.add(offset), bytes)
        });
        let addresses: Vec<u64> = self.addresses(residency, layer).collect();
        cuda.upload(&cuda.compute, self.table(layer), &addresses);
        self.marks = None;
    }
}

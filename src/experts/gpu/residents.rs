//! Experts that live in VRAM, and the tables in which kernels look for them.

use std::sync::Arc;

use moebius_cache::pack::ExpertLayout;

use super::parts::Parts;
use crate::Result;
use crate::cuda::{Address, Cuda, DeviceBuffer, PinnedBuffer};
use crate::experts::ExpertShape;
use crate::experts::residency::{Place, Residency};

/// The experts in VRAM, and where they are.
pub(super) struct Residents {
    cuda: Arc<Cuda>,
    experts: usize,
    slots: usize,                // as many experts of each layer as they are large enough for
    layers: Vec<(usize, usize)>, // where the slots of each begin, and bytes of one
    bytes: DeviceBuffer<u8>,     // [layers][slots, bytes of an expert]
    tables: DeviceBuffer<u64>,   // [layers, experts]: addresses; 0: in RAM alone
    staged: PinnedBuffer<u64>,   // [layers, experts]: what is brought there
    marks: DeviceBuffer<u64>,    // [layers, experts]: not 0 for those in VRAM and some others
    marked: Vec<Option<usize>>,  // [layers]: how many others; `None`: not known
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
            staged: PinnedBuffer::new(cuda, layers.len() * experts)?,
            marks: DeviceBuffer::new(cuda, layers.len() * experts)?,
            marked: vec![None; layers.len()],
            layers,
        })
    }

    /// Copies the experts that are to be in VRAM, those of a layer after `check`. Errors: what that says.
    pub(super) fn fill(
        &mut self,
        parts: &Parts,
        residency: &Residency,
        mut check: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let cuda = self.cuda.clone();
        for layer in 0..residency.layers() {
            if self.slots > 0 {
                check(layer)?;
            }
            for &expert in residency.in_vram(layer) {
                let Place::Vram(slot) = residency.place(layer, expert) else { continue };
                parts.upload(&cuda, layer, &[usize::from(expert)], self.address(slot));
            }
            let addresses: Vec<u64> = self.addresses(residency, layer).collect();
            self.staged[layer * self.experts..][..self.experts].copy_from_slice(&addresses);
        }
        cuda.upload(&cuda.copy, self.tables.address(), &self.staged);
        cuda.synchronize()
    }

    /// Where a slot begins.
    pub(super) fn address(&self, slot: usize) -> Address<u8> {
        let (at, bytes) = self.layers[slot / self.slots];
        self.bytes.address().add(at + slot % self.slots * bytes)
    }

    fn address_of(&self, residency: &Residency, layer: usize, expert: u16) -> u64 {
        match residency.place(layer, expert) {
            Place::Vram(slot) => self.address(slot).to_u64(),
            Place::Ram | Place::OnHolder => 0,
        }
    }

    /// Where each expert of a layer is in VRAM; 0: it is not.
    pub(super) fn addresses(&self, residency: &Residency, layer: usize) -> impl Iterator<Item = u64> {
        (0..self.experts as u16).map(move |expert| self.address_of(residency, layer, expert))
    }

    /// Brings what changed to the tables, before the next pass in the compute stream.
    pub(super) fn update(&mut self, residency: &Residency, moved: &[(usize, u16)]) {
        self.stage(residency, moved);
        self.cuda.upload(&self.cuda.compute, self.tables.address(), &self.staged);
    }

    /// Writes what changed where it is brought to the tables from.
    pub(super) fn stage(&mut self, residency: &Residency, moved: &[(usize, u16)]) {
        for &(layer, expert) in moved {
            self.staged[layer * self.experts + expert as usize] = self.address_of(residency, layer, expert);
            self.marked[layer] = None;
        }
    }

    /// Where it writes that.
    pub(super) fn staged(&self) -> Address<u64> {
        self.staged.address()
    }

    /// [`addresses`](Residents::addresses) on the device.
    pub(super) fn table(&self, layer: usize) -> Address<u64> {
        self.tables.address().add(layer * self.experts)
    }

    /// A table of `layer` that is not 0 for experts in VRAM and for those that cross: the first `streamed` in RAM.
    pub(super) fn marks(&mut self, residency: &Residency, layer: usize, streamed: usize) -> Address<u64> {
        let to = self.marks.address().add(layer * self.experts);
        if self.marked[layer] != Some(streamed) {
            self.marked[layer] = Some(streamed);
            let mut row = vec![0u64; self.experts];
            let crossing = &residency.in_ram(layer)[..streamed];
            residency.in_vram(layer).iter().chain(crossing).for_each(|&expert| row[expert as usize] = 1);
            self.cuda.upload(&self.cuda.compute, to, &row);
        }
        to
    }
}

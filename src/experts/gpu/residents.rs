//! Experts that live in VRAM, and the tables in which kernels look for them.

use std::sync::Arc;

use moebius_cache::pack::ExpertLayout;

use super::parts::Parts;
use crate::Result;
use crate::cuda::{Address, Cuda, DeviceBuffer, PinnedBuffer};
use crate::experts::ExpertShape;
use crate::experts::residency::{Move, Place, Residency};

/// Where slots of VRAM lie.
#[derive(Clone)]
pub(super) struct Slots {
    of_layer: usize,             // as many experts of each layer as they are large enough for
    layers: Vec<(usize, usize)>, // where those of each begin, and bytes of one
    bytes: usize,
}

impl Slots {
    /// Of `of_layer` experts of each layer.
    pub(super) fn new(shape: &ExpertShape, of_layer: usize) -> Self {
        let mut bytes = 0;
        let place = |layout: &ExpertLayout| {
            let at = bytes;
            bytes += of_layer * layout.bytes();
            (at, layout.bytes())
        };
        let layers = shape.layouts.iter().map(place).collect();
        Self { of_layer, layers, bytes }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.of_layer * self.layers.len()
    }

    /// Bytes of all.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where a slot begins, in bytes.
    pub(super) fn at(&self, slot: usize) -> usize {
        let (at, bytes) = self.layers[slot / self.of_layer];
        at + slot % self.of_layer * bytes
    }
}

/// The experts in VRAM, and where they are.
pub(super) struct Residents {
    cuda: Arc<Cuda>,
    experts: usize,
    slots: Slots,
    bytes: DeviceBuffer<u8>,    // [layers][slots, bytes of an expert]
    tables: DeviceBuffer<u64>,  // [layers, experts]: addresses; 0: in RAM alone
    staged: PinnedBuffer<u64>,  // [layers, experts]: what is brought there
    marks: DeviceBuffer<u64>,   // [layers, experts]: not 0 for those in VRAM and some others
    marked: Vec<Option<usize>>, // [layers]: how many others; `None`: not known
}

impl Residents {
    /// Room for `slots` experts of each layer. Errors: `Error::Resources` where VRAM ends.
    pub(super) fn new(cuda: &Arc<Cuda>, shape: &ExpertShape, slots: usize) -> Result<Self> {
        let (layers, experts) = (shape.layers(), shape.experts);
        let slots = Slots::new(shape, slots);
        Ok(Self {
            cuda: cuda.clone(),
            experts,
            bytes: DeviceBuffer::new(cuda, slots.bytes())?,
            slots,
            tables: DeviceBuffer::new(cuda, layers * experts)?,
            staged: PinnedBuffer::new(cuda, layers * experts)?,
            marks: DeviceBuffer::new(cuda, layers * experts)?,
            marked: vec![None; layers],
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
            if self.slots.len() > 0 {
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
        self.bytes.address().add(self.slots.at(slot))
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

    /// The slots, and where they begin.
    pub(super) fn slots(&self) -> (Slots, Address<u8>) {
        (self.slots.clone(), self.bytes.address())
    }

    /// Brings [what moved](Residency::moves) to the tables, before the next pass in the compute stream.
    pub(super) fn update(&mut self, residency: &Residency) {
        for &Move { layer, expert, .. } in residency.moves() {
            self.staged[layer * self.experts + expert as usize] = self.address_of(residency, layer, expert);
            self.marked[layer] = None;
        }
        self.cuda.upload(&self.cuda.compute, self.tables.address(), &self.staged);
    }

    /// The same, as they were brought to the device.
    pub(super) fn held(&self, layer: usize) -> &[u64] {
        &self.staged[layer * self.experts..][..self.experts]
    }

    /// [`addresses`](Residents::addresses) on the device.
    pub(super) fn table(&self, layer: usize) -> Address<u64> {
        self.tables.address().add(layer * self.experts)
    }

    /// A table of `layer` that is not 0 for experts in VRAM and for those that cross: the first `streamed` others.
    pub(super) fn marks(&mut self, residency: &Residency, layer: usize, streamed: usize) -> Address<u64> {
        let to = self.marks.address().add(layer * self.experts);
        if self.marked[layer] != Some(streamed) {
            self.marked[layer] = Some(streamed);
            let mut row = vec![0u64; self.experts];
            let crossing = &residency.not_in_vram(layer)[..streamed];
            residency.in_vram(layer).iter().chain(crossing).for_each(|&expert| row[expert as usize] = 1);
            self.cuda.upload(&self.cuda.compute, to, &row);
        }
        to
    }
}

//! Where every routed expert lives: one table, and the moves that change it.

/// Where an expert's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In VRAM, in this slot of its layer.
    Vram(usize),
    /// In RAM alone.
    Ram,
}

/// An expert in RAM that takes a slot of VRAM; the one that was there goes back to RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Counted among MoE layers.
    pub layer: usize,
    /// The slot in its layer.
    pub slot: usize,
    /// The expert that comes.
    pub expert: u16,
}

/// The place of each expert of each layer. All slots of VRAM are taken, as many in each layer.
#[derive(Clone, Debug)]
pub struct Residency {
    slots: usize,
    layers: Vec<Vec<u16>>, // [layers, experts]: those in VRAM by slot, then those in RAM, the most chosen first
}

impl Residency {
    /// The first `slots` experts of each layer's order are in VRAM.
    pub fn new(orders: impl IntoIterator<Item = Vec<u16>>, slots: usize) -> Self {
        let layers: Vec<Vec<u16>> = orders.into_iter().collect();
        assert!(layers.iter().all(|layer| slots <= layer.len()), "{slots} slots are more than there are experts");
        Self { slots, layers }
    }

    /// MoE layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Slots of VRAM of each layer.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// The experts of a layer that are in VRAM, by slot.
    pub fn in_vram(&self, layer: usize) -> &[u16] {
        &self.layers[layer][..self.slots]
    }

    /// The experts of a layer that are in RAM alone, in the order in which they cross.
    pub fn in_ram(&self, layer: usize) -> &[u16] {
        &self.layers[layer][self.slots..]
    }

    /// Where an expert is.
    pub fn place(&self, layer: usize, expert: u16) -> Place {
        match self.in_vram(layer).iter().position(|&other| other == expert) {
            Some(slot) => Place::Vram(slot),
            None => Place::Ram,
        }
    }

    /// Makes a move. Panics: the expert is not in RAM (a bug).
    pub fn make(&mut self, Move { layer, slot, expert }: Move) {
        let rank = self.in_ram(layer).iter().position(|&other| other == expert).expect("a move is out of RAM");
        self.layers[layer].swap(slot, self.slots + rank);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_changes_two_places_and_no_other() {
        let mut residency = Residency::new([vec![3, 0, 2, 1], vec![0, 1, 2, 3]], 2);
        let places = |residency: &Residency, layer| [0, 1, 2, 3].map(|expert| residency.place(layer, expert));
        assert_eq!(places(&residency, 0), [Place::Vram(1), Place::Ram, Place::Ram, Place::Vram(0)]);
        residency.make(Move { layer: 0, slot: 1, expert: 1 });
        assert_eq!(places(&residency, 0), [Place::Ram, Place::Vram(1), Place::Ram, Place::Vram(0)]);
        assert_eq!((residency.in_vram(0), residency.in_ram(0)), (&[3, 1][..], &[2, 0][..]));
        assert_eq!(places(&residency, 1), [Place::Vram(0), Place::Vram(1), Place::Ram, Place::Ram]);
    }
}

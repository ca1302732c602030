//! Where every routed expert lives: one table, and the slots of VRAM.

/// Where an expert's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In VRAM, in this slot.
    Vram(usize),
    /// In RAM alone.
    Ram,
    /// On another GPU, which holds it for good.
    OnHolder,
}

/// An expert that came into VRAM, or left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Counted among MoE layers.
    pub layer: usize,
    /// The expert.
    pub expert: u16,
    /// Where it came to; `None`: it left.
    pub to: Option<usize>,
}

/// The place of each expert of each layer. Slots of VRAM are numbered over all layers.
#[derive(Clone, Debug)]
pub struct Residency {
    layers: Vec<Layer>,
    slots: Vec<Option<(usize, u16)>>, // the layer and expert in each
    moves: Vec<Move>,
}

#[derive(Clone, Debug)]
struct Layer {
    order: Vec<u16>, // [experts]: those in VRAM, then those in RAM, the most chosen first; then those on holders
    rank: Vec<u16>,  // [experts], in `order`
    slot: Vec<u32>,  // [experts], of those in VRAM
    in_vram: usize,
    here: usize,
}

impl Residency {
    /// The first `slots` experts of each layer's order are in VRAM: of layer 0, then of layer 1. The next `on_holders`
    /// are on other GPUs.
    pub fn new(orders: impl IntoIterator<Item = Vec<u16>>, slots: usize, on_holders: usize) -> Self {
        let mut residency = Self { layers: Vec::new(), slots: Vec::new(), moves: Vec::new() };
        for mut order in orders {
            assert!(
                slots + on_holders <= order.len(),
                "{slots} slots and {on_holders} others are more than there are experts"
            );
            order[slots..].rotate_left(on_holders);
            let (mut rank, mut slot) = (vec![0; order.len()], vec![0; order.len()]);
            for (i, &expert) in order.iter().enumerate() {
                rank[expert as usize] = i as u16;
                if i < slots {
                    slot[expert as usize] = residency.slots.len() as u32;
                    residency.slots.push(Some((residency.layers.len(), expert)));
                }
            }
            let here = order.len() - on_holders;
            residency.layers.push(Layer { order, rank, slot, in_vram: slots, here });
        }
        residency
    }

    /// MoE layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Slots of VRAM.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// The layer and expert in a slot.
    pub fn in_slot(&self, slot: usize) -> Option<(usize, u16)> {
        self.slots[slot]
    }

    /// The experts of a layer that are in VRAM.
    pub fn in_vram(&self, layer: usize) -> &[u16] {
        let Layer { order, in_vram, .. } = &self.layers[layer];
        &order[..*in_vram]
    }

    /// The experts of a layer that are in RAM alone, in the order in which they cross.
    pub fn in_ram(&self, layer: usize) -> &[u16] {
        let Layer { order, in_vram, here, .. } = &self.layers[layer];
        &order[*in_vram..*here]
    }

    /// Those, and behind them the experts that other GPUs hold.
    pub fn not_in_vram(&self, layer: usize) -> &[u16] {
        let Layer { order, in_vram, .. } = &self.layers[layer];
        &order[*in_vram..]
    }

    /// The experts of a layer that other GPUs hold, the most chosen first.
    pub fn on_holders(&self, layer: usize) -> &[u16] {
        let Layer { order, here, .. } = &self.layers[layer];
        &order[*here..]
    }

    /// Where an expert is.
    pub fn place(&self, layer: usize, expert: u16) -> Place {
        let Layer { rank, slot, in_vram, here, .. } = &self.layers[layer];
        match usize::from(rank[expert as usize]) {
            rank if rank < *in_vram => Place::Vram(slot[expert as usize] as usize),
            rank if rank < *here => Place::Ram,
            _ => Place::OnHolder,
        }
    }

    /// Whether another GPU holds what may be an expert of a layer.
    pub fn is_on_holder(&self, layer: usize, id: i32) -> bool {
        let Layer { rank, here, .. } = &self.layers[layer];
        usize::try_from(id).ok().and_then(|id| rank.get(id)).is_some_and(|&rank| usize::from(rank) >= *here)
    }

    /// Takes an expert out of its slot, and returns the slot. Panics: it is in none (a bug).
    pub fn leave(&mut self, layer: usize, expert: u16) -> usize {
        let Place::Vram(slot) = self.place(layer, expert) else { panic!("only an expert in VRAM leaves it") };
        self.slots[slot] = None;
        self.moves.push(Move { layer, expert, to: None });
        let layer = &mut self.layers[layer];
        layer.in_vram -= 1;
        layer.swap(expert, layer.in_vram);
        slot
    }

    /// Puts an expert in RAM into a slot that holds none. Panics: it does, or the expert is in VRAM (a bug).
    pub fn enter(&mut self, layer: usize, expert: u16, slot: usize) {
        assert!(self.slots[slot].is_none() && self.place(layer, expert) == Place::Ram);
        self.slots[slot] = Some((layer, expert));
        self.moves.push(Move { layer, expert, to: Some(slot) });
        let layer = &mut self.layers[layer];
        layer.swap(expert, layer.in_vram);
        layer.in_vram += 1;
        layer.slot[expert as usize] = slot as u32;
    }

    /// What came and left, in this order, since it was [forgotten](Residency::forget_moves).
    pub fn moves(&self) -> &[Move] {
        &self.moves
    }

    /// Forgets what came and left.
    pub fn forget_moves(&mut self) {
        self.moves.clear();
    }

    /// Does what another one, equal to this, has done: they are equal again, the orders of layers as well.
    pub fn follow(&mut self, moves: &[Move]) {
        for &Move { layer, expert, to } in moves {
            match to {
                Some(slot) => self.enter(layer, expert, slot),
                None => drop(self.leave(layer, expert)),
            }
        }
    }
}

impl Layer {
    /// Exchanges an expert and the one at `rank`.
    fn swap(&mut self, expert: u16, rank: usize) {
        let (from, other) = (self.rank[expert as usize], self.order[rank]);
        self.order.swap(from as usize, rank);
        self.rank[other as usize] = from;
        self.rank[expert as usize] = rank as u16;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::random::Random;

    #[test]
    fn an_expert_leaves_its_slot_to_one_of_any_layer() {
        let mut residency = Residency::new([vec![3, 0, 2, 1], vec![0, 1, 2, 3]], 2, 0);
        let places = |residency: &Residency, layer| [0, 1, 2, 3].map(|expert| residency.place(layer, expert));
        assert_eq!(places(&residency, 0), [Place::Vram(1), Place::Ram, Place::Ram, Place::Vram(0)]);
        let slot = residency.leave(0, 3);
        assert_eq!((slot, residency.in_slot(0)), (0, None));
        assert_eq!(places(&residency, 0), [Place::Vram(1), Place::Ram, Place::Ram, Place::Ram]);
        residency.enter(1, 3, slot);
        assert_eq!((residency.in_vram(0), residency.in_ram(0)), (&[0][..], &[3, 2, 1][..]));
        assert_eq!(residency.in_vram(1), [0, 1, 3]);
        assert_eq!(places(&residency, 1), [Place::Vram(2), Place::Vram(3), Place::Ram, Place::Vram(0)]);
        assert_eq!(residency.in_slot(0), Some((1, 3)));
    }

    #[test]
    fn another_one_follows() {
        let mut random = Random(3);
        let mut first = Residency::new([(0..8).collect(), (0..8).collect()], 3, 1);
        let mut other = first.clone();
        for _ in 0..200 {
            for _ in 0..random.bits() % 4 {
                let (slot, layer) = (random.bits() as usize % first.slots(), random.bits() as usize % 2);
                let missing = first.in_ram(layer)[random.bits() as usize % first.in_ram(layer).len()];
                if let Some((layer, expert)) = first.in_slot(slot) {
                    first.leave(layer, expert);
                } else {
                    first.enter(layer, missing, slot);
                }
            }
            other.follow(first.moves());
            assert_eq!(first.moves(), other.moves());
            first.forget_moves();
            other.forget_moves();
            let all = |residency: &Residency| {
                [0, 1].map(|layer| (residency.in_vram(layer).to_vec(), residency.not_in_vram(layer).to_vec()))
            };
            assert_eq!(all(&first), all(&other));
        }
    }

    #[test]
    fn those_on_holders_stay_where_they_are() {
        let mut residency = Residency::new([vec![3, 0, 2, 1, 4]], 1, 2);
        let all =
            |residency: &Residency| [residency.in_vram(0), residency.in_ram(0), residency.on_holders(0)].map(Vec::from);
        assert_eq!(all(&residency), [vec![3], vec![1, 4], vec![0, 2]]);
        let slot = residency.leave(0, 3);
        residency.enter(0, 4, slot);
        assert_eq!(all(&residency), [vec![4], vec![1, 3], vec![0, 2]]);
        assert_eq!([0, 4, 1].map(|expert| residency.place(0, expert)), [Place::OnHolder, Place::Vram(0), Place::Ram]);
    }
}

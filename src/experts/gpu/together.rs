//! Which experts are in VRAM, the same ones on all ranks: the first one decides.
//!
//! ```text
//! first    in a step      its pool takes in a layer's choices, and sends missing experts on their way to all ranks
//!          before a pass  finds what has come everywhere, and tells the others what moved
//! others   in a step      their devices copy what was sent to them
//!          before a pass  move the same
//! ```
//!
//! No rank still reads a slot into which bytes come. They are shown when the CPU begins with a layer: behind the sums
//! of the layers before, in which all ranks have a part, and in a step whose tables lack the slot on all ranks.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use moebius_cache::pack::ExpertLayout;

use super::admissions::{Admissions, Way};
use crate::experts::pool::{self, LayerChoices, Pool};
use crate::experts::residency::{Move, Residency};
use crate::experts::{ExpertShape, Traffic};
use crate::{Error, Result};

/// Decides which experts are in VRAM.
pub(super) struct Decider {
    pub(super) pool: Pool,
    bytes: Vec<u64>,                   // [layers]: of an expert, of all ranks together
    pub(super) admissions: Admissions, // to each rank that has a way
    is_closed: bool, // to one of the ranks there is none: the experts in VRAM stay as they were at the start
    crossed: u64,    // bytes of experts that were sent, or read over the link, since the start
    read: u64,       // bytes of experts in VRAM that were chosen, since the start
}

impl Decider {
    /// Of whole experts. Ranks are to be added.
    pub(super) fn new(residency: Residency, shape: &ExpertShape) -> Self {
        let kind = |of: &ExpertLayout| shape.layouts.iter().position(|layout| layout == of).expect("one of them");
        let kinds: Vec<usize> = shape.layouts.iter().map(kind).collect();
        Self {
            pool: Pool::new(residency, shape.experts, &kinds),
            bytes: shape.layouts.iter().map(|layout| layout.bytes() as u64).collect(),
            admissions: Admissions::new(shape.layers(), shape.experts),
            is_closed: false,
            crossed: 0,
            read: 0,
        }
    }

    /// Adds a rank. Where there is no way to it, nothing comes to any.
    pub(super) fn add(&mut self, way: Option<Way>) {
        self.is_closed |= way.is_none();
        self.admissions.ways.extend(way);
    }

    /// Whether experts come and go.
    pub(super) fn changes(&self) -> bool {
        !self.admissions.ways.is_empty() && !self.is_closed
    }

    /// The CPU has computed what was chosen in a layer. Takes that in, and sends experts on their way.
    pub(super) fn chosen(&mut self, layer: usize, ids: &[i32]) {
        let Self { pool, admissions, bytes, crossed, read, .. } = self;
        admissions.end_layer();
        let choices = LayerChoices { layer, ids, arrived: admissions.come() };
        let (hits, by_link) = (pool.choices().hits, pool.by_link());
        pool.chosen(choices, |admission| {
            *crossed += bytes[admission.layer];
            admissions.ways.iter_mut().for_each(|way| way.send(admission));
        });
        *read += (pool.choices().hits - hits) * bytes[layer];
        *crossed += (pool.by_link() - by_link) * bytes[layer];
    }

    /// Ends a step. Returns how often the CPU will not read an expert because of what was shown in it.
    pub(super) fn turn(&mut self) -> f32 {
        self.pool.turn();
        self.admissions.take_shown() * pool::NEXT * self.pool.saves()
    }

    /// Takes out slots for the next step.
    pub(super) fn make_room(&mut self) {
        if self.changes() {
            self.pool.make_room();
        }
    }

    /// Between two passes: what has come to all ranks is found from now on.
    pub(super) fn arrive(&mut self) {
        let come = self.admissions.come();
        self.admissions.ways.iter_mut().for_each(|way| way.take(come));
        self.pool.arrived(come);
    }
}

/// What a rank knows of where experts are.
pub(super) enum Together {
    /// It is the first one, or alone.
    First {
        /// Decides for all.
        decider: Box<Decider>,
        /// To each of the others, what moved.
        others: Vec<Sender<Arc<[Move]>>>,
    },
    /// It does what the first one decides.
    Other {
        /// As far as it was told.
        residency: Residency,
        /// From the first one, before each pass.
        moves: Receiver<Arc<[Move]>>,
    },
}

impl Together {
    /// The first rank's, which is to be [added](Together::add) itself.
    pub(super) fn first(decider: Decider) -> Self {
        Together::First { decider: Box::new(decider), others: Vec::new() }
    }

    /// [Adds](Decider::add) a rank. Panics: this is not the first one's (a bug).
    pub(super) fn add(&mut self, way: Option<Way>) {
        let Together::First { decider, .. } = self else { panic!("the first rank decides") };
        decider.add(way);
    }

    /// What the first one knows of it: bytes that crossed links, bytes that were read in VRAM, choices.
    pub(super) fn traffic(&self) -> Traffic {
        match self {
            Together::First { decider, .. } => {
                let Decider { pool, crossed, read, .. } = &**decider;
                Traffic { link: *crossed, vram: *read, choices: pool.choices(), ..Traffic::default() }
            }
            Together::Other { .. } => Traffic::default(),
        }
    }

    /// Where every expert is.
    pub(super) fn residency(&self) -> &Residency {
        match self {
            Together::First { decider, .. } => decider.pool.residency(),
            Together::Other { residency, .. } => residency,
        }
    }

    /// Another rank's, beside this first one. Panics: this is none, or experts have moved (a bug).
    pub(super) fn with_another(&mut self) -> Self {
        let Together::First { decider, others } = self else { panic!("the first rank decides") };
        let ((to_other, moves), residency) = (channel(), decider.pool.residency().clone());
        assert!(residency.moves().is_empty());
        others.push(to_other);
        Together::Other { residency, moves }
    }

    /// Before a pass: experts move, the same ones on all ranks. Errors: the first one is gone.
    pub(super) fn turn(&mut self) -> Result<()> {
        match self {
            Together::First { decider, others } => {
                decider.arrive();
                if !others.is_empty() {
                    let moves: Arc<[Move]> = decider.pool.residency().moves().into();
                    // One that has ended says so itself.
                    others.iter().for_each(|other| drop(other.send(moves.clone())));
                }
                Ok(())
            }
            Together::Other { residency, moves } => {
                let moves = moves.recv().map_err(|_| Error::Device("the first of several GPUs has ended".into()))?;
                residency.follow(&moves);
                Ok(())
            }
        }
    }

    /// Forgets [what moved](Residency::moves).
    pub(super) fn forget_moves(&mut self) {
        match self {
            Together::First { decider, .. } => decider.pool.forget_moves(),
            Together::Other { residency, .. } => residency.forget_moves(),
        }
    }
}

#[cfg(test)]
mod tests {
    use moebius_cache::Precision;

    use super::*;

    fn first() -> Together {
        let layouts = vec![ExpertLayout::new(64, 64, Precision::int4(32)).unwrap(); 2].into();
        let residency = Residency::new((0..2).map(|_| (0..4).collect()), 2, 0);
        Together::first(Decider::new(residency, &ExpertShape { layouts, experts: 4 }))
    }

    #[test]
    fn others_move_what_the_first_one_moves() {
        let mut first = first();
        let mut others = [first.with_another(), first.with_another()];
        for _ in 0..3 {
            let Together::First { decider, .. } = &mut first else { panic!("it is the first one") };
            // As if there were ways: slots are taken out, and given back.
            decider.pool.make_room();
            first.turn().unwrap();
            let moved = first.residency().moves().to_vec();
            assert!(!moved.is_empty());
            first.forget_moves();
            for other in &mut others {
                other.turn().unwrap();
                assert_eq!(other.residency().moves(), moved);
                other.forget_moves();
                let both = [&first, other].map(|of| [0, 1].map(|layer| of.residency().not_in_vram(layer).to_vec()));
                assert_eq!(both[0], both[1]);
            }
        }
        drop(first);
        assert!(others[0].turn().is_err());
    }

    #[test]
    fn nothing_comes_where_a_rank_has_no_way() {
        let Together::First { mut decider, .. } = first() else { panic!("it is the first one") };
        assert!(!decider.changes());
        decider.add(None);
        decider.make_room();
        decider.arrive();
        assert!(!decider.changes() && decider.pool.residency().moves().is_empty());
    }
}

//! The pools of several ranks, which are equal: each takes in what the first one's did, in the same order, between the
//! same two passes.
//!
//! ```text
//! first    in a step      its pool takes in a layer's choices, and what had come by then everywhere
//!          before a pass  tells the others of that, and which experts all find from now on
//! others   before a pass  their pools take in the same; what they send is copied in the step that follows
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::{Error, Result};

/// What the first rank's pool took in from one pass to the next.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn {
    /// Of a step of decode: each layer's choices, and how many experts on their way had come.
    pub(super) chosen: Vec<(Vec<i32>, usize)>,
    /// Experts on their way that all find from now on.
    pub(super) arrived: usize,
}

/// What a rank is to the others.
#[derive(Default)]
pub(super) enum Together {
    /// There are none, or nothing comes beside a step.
    #[default]
    Alone,
    /// It decides for these.
    First(Vec<Other>),
    /// It does what the first one did.
    Other {
        /// From the first one, before each pass.
        turns: Receiver<Arc<Turn>>,
        /// For the first one: experts that have come since the start.
        come: Arc<AtomicUsize>,
    },
}

/// Another rank, as the first one sees it.
pub(super) struct Other {
    turns: Sender<Arc<Turn>>,
    come: Arc<AtomicUsize>,
}

impl Together {
    /// The first rank's way to one more, and that one's.
    pub(super) fn with_another(&mut self) -> Self {
        let ((to_other, turns), come) = (channel(), Arc::new(AtomicUsize::new(0)));
        let other = Other { turns: to_other, come: come.clone() };
        match self {
            Together::First(others) => others.push(other),
            _ => *self = Together::First(vec![other]),
        }
        Together::Other { turns, come }
    }

    /// Of experts that have come since the start, those that have come to all ranks, as far as the first one knows.
    pub(super) fn come(&self, own: usize) -> usize {
        match self {
            Together::First(others) => {
                others.iter().map(|other| other.come.load(Ordering::Acquire)).min().map_or(own, |least| own.min(least))
            }
            _ => own,
        }
    }

    /// Tells the first rank how many have come since the start.
    pub(super) fn tell(&self, own: usize) {
        if let Together::Other { come, .. } = self {
            come.store(own, Ordering::Release);
        }
    }

    /// The turn before a pass: `own` on the first rank, which tells the others; theirs is the first one's. Errors: the
    /// first one is gone.
    pub(super) fn turn(&self, own: impl FnOnce() -> Turn) -> Result<Option<Arc<Turn>>> {
        match self {
            Together::Alone => Ok(None),
            Together::First(others) => {
                let turn = Arc::new(own());
                // One that has ended says so itself.
                others.iter().for_each(|other| drop(other.turns.send(turn.clone())));
                Ok(Some(turn))
            }
            Together::Other { turns, .. } => {
                turns.recv().map(Some).map_err(|_| Error::Device("the first of several GPUs has ended".into()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_hear_what_the_first_decided() {
        let mut first = Together::default();
        assert!(first.come(2) == 2 && first.turn(|| panic!("nobody hears")).unwrap().is_none());
        let others = [first.with_another(), first.with_another()];
        assert_eq!(first.come(5), 0);
        others[0].tell(3);
        others[1].tell(4);
        assert_eq!((first.come(5), first.come(2)), (3, 2));
        for arrived in [1, 2] {
            first.turn(|| Turn { arrived, ..Turn::default() }).unwrap();
        }
        for other in &others {
            let turn = || other.turn(|| panic!("the first decides")).unwrap().unwrap().arrived;
            assert_eq!((turn(), turn()), (1, 2));
        }
        drop(first);
        assert!(others[0].turn(Turn::default).is_err());
    }
}

//! VRAM as a cache of experts, in decode: which experts come into it, and which make room.
//!
//! All layers share one pool of slots. The host owns the table of who is where and decides; the device only looks
//! addresses up and copies. Nothing changes within a step, so that both sides agree on who computes which expert:
//!
//! ```text
//! before a step   what has come is in the table (`arrived`), the slots of the least useful experts are taken out of it
//!                 (`make_room`)
//! in the step     device: computes the experts in the table, hands others to the CPU, and reads some over the link
//!                 host:   `chosen` sees a layer's choices, and sends the best of the experts that were missing on
//!                         their way into slots that were taken out: nobody looks there
//!                 device: copies what is on its way while it waits for the CPU
//! ```
//!
//! So an expert that is missing is computed from RAM, while its bytes come for the tokens that follow. With several
//! rows in a step, a layer's missing experts are those of all rows, each once. A step may need more experts than there
//! are slots: those that find no slot stay in RAM. Only steps of decode change the pool; prompts use it.
//!
//! The least useful experts are those of the lowest f / (age + 1): f counts choices, halved every 32 steps, and age is
//! the number of steps since the last one. An expert whose slot was taken out and not used is back in the next step.
//!
//! A copy takes from RAM as much as the CPU's reading the expert once. It pays if experts that come are read, within 32
//! steps, at least once more often than those that they displace. Both are counted. Where it does not pay, as
//! with choices at random, one expert a step still comes, so that a change is seen.

use super::Choices;
use super::residency::{Place, Residency};

/// Steps after which a choice counts half, and within which a copy must pay.
const WINDOW: u32 = 32;

/// The first step: nothing has moved within the window before it. Choices `START` steps ago are worth nothing.
const START: u32 = 16 * WINDOW;

/// Experts on their way at a time: when one has come, the device goes on with the next one. In pools of fewer than
/// `LARGE` slots only one: a slot that waits holds nothing.
const ON_THE_WAY: usize = 2;
const LARGE: usize = 64;

/// Missing experts of this step and the last that are compared.
const WANTED: usize = 256;

/// What a copy must save: reads of an expert by the CPU.
const COST: f32 = 1.0;

/// What one more copy saves, as a share of what copies save in the mean: the best come first. With routing that is like
/// real routing it is a tenth to two fifths.
pub const NEXT: f32 = 0.33;

/// What is added to the id of an expert that was missing and that the device read over its link: as kernels/handoff.cu
/// says.
pub const BY_LINK: i32 = 1 << 16;

/// An expert on its way into VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Counted among MoE layers.
    pub layer: usize,
    /// The expert.
    pub expert: u16,
    /// Where it goes.
    pub slot: usize,
}

/// What a layer's tokens chose in a step.
#[derive(Clone, Copy, Debug)]
pub struct LayerChoices<'a> {
    /// Counted among MoE layers.
    pub layer: usize,
    /// Experts of all rows; `!id` for what was in VRAM, `id + BY_LINK` for what was read over the link.
    pub ids: &'a [i32],
    /// Of the experts on their way, how many have come by now.
    pub arrived: usize,
}

/// Slots of VRAM for the experts of all layers.
pub struct Pool {
    residency: Residency,
    experts: usize,
    uses: Vec<Use>,             // [layers, experts]
    classes: Vec<Class>,        // of slots, by their size
    class_of: Vec<usize>,       // [layers]
    wanted: Vec<(usize, u16)>,  // experts that were missing in this step or the last, by layer
    on_the_way: Vec<Admission>, // in the order in which they come
    step: u32,
    sent: usize, // in this step
    came: Reads,
    went: Reads,
    choices: Choices,
    by_link: u64,    // misses that the device read over its link
    worth: Vec<f32>, // [steps since the last choice]: of one choice
    scored: Vec<(f32, u32)>,
}

/// The share of choices that a pool with room for a share of the experts holds, as published for LRU caches with real
/// models: Qwen3-30B-A3B and Qwen3.8-Flash-Next.
pub fn expected_hits(share: f64) -> f64 {
    const HITS: [(f64, f64); 9] = [
        (0.0, 0.0),
        (0.0625, 0.37),
        (0.125, 0.62),
        (0.19, 0.74),
        (0.25, 0.81),
        (0.38, 0.89),
        (0.5, 0.92),
        (0.64, 0.96),
        (1.0, 1.0),
    ];
    let above = HITS.iter().position(|&(at, _)| share <= at).unwrap_or(HITS.len() - 1).max(1);
    let ((low, from), (high, to)) = (HITS[above - 1], HITS[above]);
    from + (to - from) * (share - low) / (high - low)
}

/// What is known of an expert's use in decode.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    count: f32,  // of choices, at `step`
    step: u32,   // of the last choice
    moved: u32,  // the step of `last`
    last: Moved, // move
    comes: bool, // is on its way
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Moved {
    #[default]
    Never,
    Came,
    Went,
}

/// Slots of one size.
#[derive(Debug, Default)]
struct Class {
    slots: Vec<u32>,
    room: Vec<(u32, usize, u16)>, // slots that were taken out: the layer and expert whose bytes they have; best last
    given: usize,                 // slots that were taken out for this step
    wanted: f32,                  // slots that a step fills
}

/// Reads of experts that moved, within the window.
#[derive(Clone, Copy, Debug)]
struct Reads {
    reads: f32,
    moves: f32,
}

impl Reads {
    /// What was seen long ago counts less, as long as something moves.
    fn fade(&mut self) {
        const KEEP: f32 = 0.99;
        if self.moves > 1.0 {
            (self.reads, self.moves) = (KEEP * self.reads, KEEP * self.moves);
        }
    }

    fn mean(self) -> f32 {
        self.reads / self.moves.max(1e-3)
    }
}

impl Pool {
    /// A pool of the slots of `residency`. `sizes` are equal of layers whose experts take as much, and may take each
    /// other's slots.
    pub fn new(residency: Residency, experts: usize, sizes: &[usize]) -> Self {
        let of_layers = sizes;
        let mut sizes = sizes.to_vec();
        sizes.sort_unstable();
        sizes.dedup();
        let class_of: Vec<usize> = of_layers.iter().map(|of| sizes.partition_point(|size| size < of)).collect();
        let mut classes: Vec<Class> = sizes.iter().map(|_| Class::default()).collect();
        let mut uses = vec![Use::default(); residency.layers() * experts];
        let of_layer = residency.slots() / residency.layers();
        for slot in 0..residency.slots() {
            let (layer, expert) = residency.in_slot(slot).expect("all slots are taken at first");
            classes[class_of[layer]].slots.push(slot as u32);
            // As if tokens had just chosen them, the most popular last.
            let rank = (slot % of_layer) as u32;
            let used = &mut uses[layer * experts + expert as usize];
            (used.count, used.step) = (1.0, START - (1 + rank).min(START));
        }
        let worth = |age: u32| (-(age as f32) / WINDOW as f32).exp2() / (age + 1) as f32;
        Self {
            uses,
            residency,
            experts,
            classes,
            class_of,
            wanted: Vec::with_capacity(WANTED),
            on_the_way: Vec::new(),
            step: START,
            sent: 0,
            // As if it paid: the first steps tell.
            came: Reads { reads: 40.0, moves: 10.0 },
            went: Reads { reads: 10.0, moves: 10.0 },
            choices: Choices::default(),
            by_link: 0,
            worth: (0..=START).map(worth).collect(),
            scored: Vec::new(),
        }
    }

    /// Where every expert is.
    pub fn residency(&self) -> &Residency {
        &self.residency
    }

    /// Choices so far.
    pub fn choices(&self) -> Choices {
        self.choices
    }

    /// Of the misses so far, those that the device read over its link.
    pub fn by_link(&self) -> u64 {
        self.by_link
    }

    /// Forgets [what came and left](Residency::moves).
    pub fn forget_moves(&mut self) {
        self.residency.forget_moves();
    }

    /// Takes in what a layer's tokens chose. `send` is given the experts that are to be sent on their way.
    pub fn chosen(&mut self, LayerChoices { layer, ids, arrived }: LayerChoices<'_>, mut send: impl FnMut(Admission)) {
        let pays = self.pays();
        for &id in ids {
            let (is_hit, by_link) = (id < 0, id >= BY_LINK);
            let expert = if is_hit { !id } else { id % BY_LINK } as usize;
            let used = match self.uses[layer * self.experts..].get_mut(expert).filter(|_| expert < self.experts) {
                // Another row has chosen it, or it is no expert.
                Some(used) if used.step == self.step => continue,
                None => continue,
                Some(used) => used,
            };
            if self.step - used.moved <= WINDOW {
                match used.last {
                    Moved::Came => self.came.reads += 1.0,
                    Moved::Went => self.went.reads += 1.0,
                    Moved::Never => {}
                }
            }
            used.count = 1.0 + used.count * (-((self.step - used.step) as f32) / WINDOW as f32).exp2();
            used.step = self.step;
            if is_hit {
                self.choices.hits += 1;
                continue;
            }
            self.choices.misses += 1;
            self.by_link += u64::from(by_link);
            let class = &mut self.classes[self.class_of[layer]];
            if let Some(own) = class.room.iter().position(|&(_, l, e)| (l, e as usize) == (layer, expert)) {
                // Its bytes are still there.
                let (slot, ..) = class.room.remove(own);
                self.residency.enter(layer, expert as u16, slot as usize);
                continue;
            }
            // One that comes is not wanted again, nor one whose slot `make_room` has given back since the step began:
            // whatever is wanted stays in RAM alone until it is sent.
            let missing = (layer, expert as u16);
            let is_away = !used.comes && self.residency.place(layer, missing.1) == Place::Ram;
            if is_away && self.wanted.len() < WANTED && !self.wanted.contains(&missing) {
                self.wanted.push(missing);
            }
        }
        let on_the_way = if self.residency.slots() < LARGE { 1 } else { ON_THE_WAY };
        while self.on_the_way.len() - arrived < on_the_way && (pays || self.sent == 0) {
            let Some((layer, expert)) = self.take_best_wanted() else { break };
            let Some((slot, of, gone)) = self.classes[self.class_of[layer]].room.pop() else { continue };
            self.uses[layer * self.experts + expert as usize].comes = true;
            let gone = &mut self.uses[of * self.experts + gone as usize];
            (gone.last, gone.moved) = (Moved::Went, self.step);
            self.went.moves += 1.0;
            self.sent += 1;
            let admission = Admission { layer, expert, slot: slot as usize };
            self.on_the_way.push(admission);
            send(admission);
        }
    }

    /// The most useful of the experts that were missing.
    fn take_best_wanted(&mut self) -> Option<(usize, u16)> {
        let Self { wanted, uses, residency, experts, step, worth, .. } = self;
        let of = |layer: usize, expert: u16| &uses[layer * *experts + expert as usize];
        wanted.retain(|&(layer, expert)| {
            let used = of(layer, expert);
            debug_assert!(!used.comes && residency.place(layer, expert) == Place::Ram);
            *step - used.step <= 1
        });
        let value = |&(layer, expert): &(usize, u16)| {
            let used = of(layer, expert);
            used.count * worth[(*step - used.step) as usize]
        };
        let best = (0..wanted.len()).max_by(|&a, &b| value(&wanted[a]).total_cmp(&value(&wanted[b])))?;
        Some(wanted.swap_remove(best))
    }

    /// Reads of an expert by the CPU that a copy saves.
    pub fn saves(&self) -> f32 {
        (self.came.mean() - self.went.mean()).max(0.0)
    }

    /// Whether copies save more reads than they cost.
    fn pays(&self) -> bool {
        self.saves() > COST
    }

    /// The first `n` of the experts on their way have come, and the next step finds them.
    pub fn arrived(&mut self, n: usize) {
        for Admission { layer, expert, slot } in self.on_the_way.drain(..n) {
            self.residency.enter(layer, expert, slot);
            let used = &mut self.uses[layer * self.experts + expert as usize];
            (used.comes, used.last, used.moved) = (false, Moved::Came, self.step);
            self.came.moves += 1.0;
        }
    }

    /// Ends a step.
    pub fn turn(&mut self) {
        self.step += 1;
        self.came.fade();
        self.went.fade();
        self.sent = 0;
    }

    /// Takes out slots for the next step.
    pub fn make_room(&mut self) {
        let pays = self.pays();
        let Self { residency, experts, uses, classes, step, worth, scored, .. } = self;
        for class in classes {
            let filled = (class.given - class.room.len()) as f32;
            class.wanted = filled.max(0.9 * class.wanted + 0.1 * filled);
            let all_filled = class.room.is_empty();
            for (slot, layer, expert) in class.room.drain(..) {
                residency.enter(layer, expert, slot as usize);
            }
            // Some more than were filled, so that the number can grow.
            let more = if all_filled { 0.5 } else { 0.125 };
            let n = if pays { (class.wanted * (1.0 + more)) as usize + 2 } else { 2 };
            let n = n.min((class.slots.len() / 4).max(1));
            scored.clear();
            for &slot in &class.slots {
                let Some((layer, expert)) = residency.in_slot(slot as usize) else { continue };
                let used = &uses[layer * *experts + expert as usize];
                let age = ((*step - used.step) as usize).min(worth.len() - 1);
                scored.push((used.count * worth[age], slot));
            }
            let n = n.min(scored.len());
            class.given = n;
            if n == 0 {
                continue;
            }
            scored.select_nth_unstable_by(n - 1, |a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            scored.truncate(n);
            // The least useful is filled first: from the end.
            scored.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
            for &(_, slot) in &*scored {
                let (layer, expert) = residency.in_slot(slot as usize).expect("only those were scored");
                residency.leave(layer, expert);
                class.room.push((slot, layer, expert));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::random::Random;

    const LAYERS: usize = 3;
    const EXPERTS: usize = 64;
    const TOP_K: usize = 4;

    /// Runs steps whose choices are `choose(step, layer)`; hits and copies in the second half.
    fn run(slots: usize, steps: usize, mut choose: impl FnMut(usize, usize) -> Vec<i32>) -> (f64, f64) {
        let orders = (0..LAYERS).map(|_| (0..EXPERTS as u16).collect());
        let mut pool = Pool::new(Residency::new(orders, slots, 0), EXPERTS, &[100; LAYERS]);
        let (mut sent, mut before, mut half) = (0, Choices::default(), 0);
        for step in 0..steps {
            let mut on_the_way = 0;
            for layer in 0..LAYERS {
                let place = |id: i32| match pool.residency().place(layer, id as u16) {
                    Place::Vram(_) => !id,
                    Place::Ram | Place::OnHolder => id,
                };
                let ids: Vec<i32> = choose(step, layer).into_iter().map(place).collect();
                // Copies take a layer.
                let choices = LayerChoices { layer, ids: &ids, arrived: on_the_way };
                let mut now = 0;
                pool.chosen(choices, |_| now += 1);
                (sent, on_the_way) = (sent + now, on_the_way + now);
            }
            pool.turn();
            pool.make_room();
            let n = pool.on_the_way.len();
            pool.arrived(n);
            pool.forget_moves();
            let held = (0..pool.residency().slots()).filter(|&slot| pool.residency().in_slot(slot).is_some()).count();
            let room: usize = pool.classes.iter().map(|class| class.room.len()).sum();
            assert_eq!(held + room, LAYERS * slots, "a slot was lost");
            if step + 1 == steps / 2 {
                (before, half, sent) = (pool.choices(), step + 1, 0);
            }
        }
        let Choices { hits, misses } = pool.choices();
        let (hits, misses) = ((hits - before.hits) as f64, (misses - before.misses) as f64);
        (hits / (hits + misses), sent as f64 / (steps - half) as f64)
    }

    #[test]
    fn repeated_choices_are_held() {
        // Each layer goes through a topic of 8 experts after the other.
        let mut random = Random(5);
        let (hits, _) = run(16, 800, |step, layer| {
            let topic = 7 * (step / 100) + 5 * layer;
            (0..TOP_K).map(|i| ((topic + 2 * i + (random.bits() % 2) as usize) % EXPERTS) as i32).collect()
        });
        assert!(hits > 0.85, "{hits}");
    }

    #[test]
    fn choices_at_random_are_not_fetched() {
        let mut random = Random(6);
        let (hits, sent) = run(16, 2000, |_, _| (0..TOP_K).map(|_| (random.bits() % EXPERTS as u64) as i32).collect());
        assert!((hits - 0.25).abs() < 0.05 && sent < 2.0, "{hits} {sent}");
    }

    #[test]
    fn a_pool_of_few_slots_and_one_of_all() {
        for slots in [1, EXPERTS] {
            let (hits, _) = run(slots, 100, |step, _| (0..TOP_K).map(|i| ((step / 9 + i) % EXPERTS) as i32).collect());
            assert!((0.0..=1.0).contains(&hits));
        }
    }

    /// What comes may come in any layer of any step, and slots are taken out before the last layer's choices are seen.
    #[test]
    fn copies_may_take_steps() {
        let mut random = Random(7);
        let orders = (0..LAYERS).map(|_| (0..8).collect());
        let mut pool = Pool::new(Residency::new(orders, 4, 0), 8, &[100; LAYERS]);
        for step in 0..5000 {
            let mut arrived = 0;
            for layer in 0..LAYERS {
                // Sometimes more are in use than there are slots.
                let (topic, wide) = (step / 50 + layer, 2 + step / 200 % 7);
                let chosen = (0..2).map(|_| (topic + random.bits() as usize % wide) % 8);
                let place = |id: usize| match pool.residency().place(layer, id as u16) {
                    Place::Vram(_) => !(id as i32),
                    Place::Ram | Place::OnHolder => id as i32,
                };
                let ids: Vec<i32> = chosen.map(place).collect();
                if layer + 1 == LAYERS {
                    pool.make_room();
                }
                if random.bits() % 6 == 0 {
                    arrived = pool.on_the_way.len();
                }
                pool.chosen(LayerChoices { layer, ids: &ids, arrived }, |_| {});
            }
            pool.turn();
            pool.arrived(arrived);
            pool.forget_moves();
        }
        assert!(pool.choices().hits > 0 && pool.choices().misses > 0);
    }

    #[test]
    fn slots_are_for_experts_of_their_size() {
        let orders = (0..2).map(|_| (0..EXPERTS as u16).collect());
        let mut pool = Pool::new(Residency::new(orders, 8, 0), EXPERTS, &[100, 50]);
        for _ in 0..20 {
            for layer in 0..2 {
                let ids: Vec<i32> = (30..34).collect();
                pool.chosen(LayerChoices { layer, ids: &ids, arrived: 0 }, |admission| {
                    assert_eq!(admission.slot / 8, admission.layer);
                });
            }
            let n = pool.on_the_way.len();
            pool.arrived(n);
            pool.turn();
            pool.make_room();
        }
        assert!((30..34).all(|e| pool.residency().place(1, e) != Place::Ram));
    }
}

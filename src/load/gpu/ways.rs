//! Which of a machine's GPUs make a model fastest, and how, from what is known before anything is loaded.
//!
//! ```text
//! alone      one of them
//! divided    some of a kind that reach each other's memory, with a share each
//! beside     one, and others that hold experts for it
//! staged     some, with a run of the layers each, where a model fits none of them alone
//! ```
//!
//! More GPUs are used where they bring a tenth, by what is expected of each way (`load/gpu/speed.rs`). One that brings
//! less is left alone, by name.

use std::sync::Arc;

use super::plan::{GpuPlan, Short, may_take};
use super::speed::{GpuRates, HolderRates, on_gpu, products};
use super::stages::{Place, attempt_stages, on_stages};
use crate::config::Split;
use crate::cuda::{self, Cuda, DeviceInfo, MAX_RANKS};
use crate::load::machine::{Machine, gib};
use crate::load::spec::Spec;
use crate::load::speed::{CpuRates, Expected};
use crate::{Error, Result};

/// How much faster more GPUs must be, in decode times in a prompt, to be used.
const WORTH: f64 = 1.1;

/// What copies reach of a bus's bandwidth.
const MEASURED: f64 = 0.86;

/// Bytes of VRAM a second of a GPU whose driver does not tell.
const BUS_BYTES: f64 = 400e9;

/// Bytes of a link a second that was not measured.
const LINK_BYTES: f64 = 25e9;

/// A GPU, as it is known before anything is loaded.
#[derive(Clone, Debug)]
pub(super) struct Card {
    /// In `--device`.
    pub(super) number: usize,
    /// What it is.
    pub(super) info: DeviceInfo,
    rates: HolderRates,
}

impl Card {
    /// What is known of one that is not open: all of its VRAM may be free.
    pub(super) fn known(number: usize, info: DeviceInfo) -> Self {
        let vram_bytes = MEASURED * cuda::bus_bandwidth(number).unwrap_or(BUS_BYTES);
        Self { number, rates: HolderRates { vram_bytes, products: products(&info), link_bytes: LINK_BYTES }, info }
    }

    /// What can be measured of it.
    pub(super) fn measure(&mut self, cuda: &Arc<Cuda>) -> Result<()> {
        (self.info, self.rates) = (cuda.info.clone(), HolderRates::measure(cuda)?);
        Ok(())
    }

    pub(super) fn name(&self) -> String {
        format!("cuda:{} ({}, {:.1} GiB)", self.number, self.info.name, gib(self.info.total_bytes))
    }
}

/// What each of several GPUs has of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// A share of every layer.
    Width,
    /// The first one all but experts, the others these.
    Experts,
    /// Some layers.
    Layers,
}

/// A way to use some of the GPUs.
#[derive(Clone, Debug)]
pub(super) struct Way {
    /// Which of them, in the order of what they have.
    pub(super) cards: Vec<usize>,
    /// What each of them has; one that is alone has everything.
    pub(super) how: How,
    /// How fast it should be. Errors: why it cannot be.
    expected: std::result::Result<Expected, String>,
}

impl Way {
    /// Decode times prompts; 0: it cannot be.
    fn worth(&self) -> f64 {
        self.expected.as_ref().map_or(0.0, |of| of.decode_tok_per_s * of.prefill_tok_per_s)
    }

    fn is_worth_more_than(&self, other: &Self) -> bool {
        self.worth() > WORTH * other.worth()
    }
}

/// Who decides.
pub(super) struct Ways<'a> {
    pub(super) spec: &'a Spec<'a>,
    pub(super) machine: &'a Machine,
    pub(super) cpu: &'a CpuRates,
    /// In the order of their numbers.
    pub(super) cards: &'a [Card],
    /// Whether two of them reach each other's memory.
    pub(super) reach: &'a dyn Fn(&Card, &Card) -> bool,
}

impl Ways<'_> {
    /// The way that is worth its GPUs, and why.
    pub(super) fn choose(&self) -> (Way, String) {
        let alone: Vec<Way> = (0..self.cards.len()).map(|i| self.expect(vec![i], How::Experts)).collect();
        // Of equal ones the first; where the model fits none, the strongest.
        let strength = |way: &&Way| self.strength(way.cards[0]);
        let better = |best: Way, way: &Way| if way.is_worth_more_than(&best) { way.clone() } else { best };
        let strongest = alone.iter().rev().max_by(|a, b| strength(a).total_cmp(&strength(b))).unwrap_or(&alone[0]);
        let first = match alone.iter().any(|way| way.worth() > 0.0) {
            true => alone.iter().fold(alone[0].clone(), better),
            false => strongest.clone(),
        };
        let wanted = |how| self.spec.config.split.allows(how);
        let width = if wanted(How::Width) { self.divided() } else { Vec::new() };
        let experts = if wanted(How::Experts) { self.beside(&first) } else { Vec::new() };
        // One after the other: that is for what fits no GPU alone, unless it is wanted.
        let is_staged = first.worth() == 0.0 || self.spec.config.split == Split::Layers;
        let layers = if wanted(How::Layers) && is_staged { self.staged() } else { Vec::new() };
        let several = [width, experts, layers].concat();
        // The fastest of each number of GPUs.
        let best = (2..=self.cards.len()).fold(first.clone(), |best, n| {
            let of = several.iter().filter(|way| way.cards.len() == n);
            of.max_by(|a, b| a.worth().total_cmp(&b.worth())).map_or(best.clone(), |way| better(best, way))
        });
        // A way that the user wants is taken where it can be.
        let wanted = several.iter().filter(|way| self.spec.config.split != Split::Auto && way.worth() > 0.0);
        let best = match wanted.max_by(|a, b| a.worth().total_cmp(&b.worth())) {
            Some(wanted) if best.cards.len() == 1 => wanted.clone(),
            _ => best,
        };
        let said = self.say(&best, &first, &several);
        (best, said)
    }

    fn strength(&self, card: usize) -> f64 {
        self.cards[card].rates.products
    }

    /// VRAM that may be taken of a GPU.
    pub(super) fn vram(&self, card: usize) -> u64 {
        let most = may_take(&self.cards[card].info);
        self.spec.config.vram.first().map_or(most, |&bound| bound.min(most))
    }

    fn expect(&self, cards: Vec<usize>, how: How) -> Way {
        let expected = match how {
            How::Width | How::Experts => self.expected(&cards, how == How::Width),
            How::Layers => self.expected_of_stages(&cards),
        };
        Way { cards, how, expected }
    }

    fn expected_of_stages(&self, cards: &[usize]) -> std::result::Result<Expected, String> {
        let place = |&i: &usize| {
            let Card { number, info, .. } = &self.cards[i];
            Place { number: *number, info: info.clone(), vram: self.vram(i) }
        };
        let places: Vec<Place> = cards.iter().map(place).collect();
        let stages = planned(attempt_stages(self.spec, &places, self.machine))?;
        let rates = |&i: &usize| {
            let HolderRates { vram_bytes, link_bytes, .. } = self.cards[i].rates;
            GpuRates::of(self.cpu, 1, vram_bytes, link_bytes)
        };
        let rates: Vec<GpuRates> = cards.iter().map(rates).collect();
        on_stages(&stages, self.spec, &rates).map_err(|error| error.to_string())
    }

    fn expected(&self, cards: &[usize], is_divided: bool) -> std::result::Result<Expected, String> {
        let HolderRates { vram_bytes, link_bytes, .. } = self.cards[cards[0]].rates;
        let (spec, ranks) = match is_divided {
            true => (self.spec.on(cards.len()), cards.len()),
            false => (self.spec.with_beside(cards[1..].iter().map(|&i| self.vram(i)).collect()), 1),
        };
        let info = match is_divided {
            true => least(cards.iter().map(|&i| &self.cards[i].info)),
            false => self.cards[cards[0]].info.clone(),
        };
        let plan = planned(GpuPlan::attempt(&spec, &info, self.machine))?;
        let holds = |i: usize| plan.holders.iter().any(|holder| holder.number == i);
        if !is_divided && !(0..cards.len() - 1).all(holds) {
            let experts = self.spec.model.moe().map_or(0, |moe| moe.num_experts);
            let is_enough = plan.sizes.is_none_or(|sizes| sizes.in_ram(experts) == 0);
            return Err(match is_enough {
                true => "all experts are in VRAM without it".into(),
                false => "it has no room for an expert of each layer".into(),
            });
        }
        let beside = if is_divided { &[][..] } else { &cards[1..] };
        let beside = beside.iter().map(|&i| self.cards[i].rates).collect();
        let rates = GpuRates { beside, ..GpuRates::of(self.cpu, ranks, vram_bytes, link_bytes) };
        on_gpu(&plan, &spec, &rates).map_err(|error| error.to_string())
    }

    /// Shares on two, four and so on of a kind, and on all.
    fn divided(&self) -> Vec<Way> {
        let mut ways = Vec::new();
        for (i, card) in self.cards.iter().enumerate() {
            let alike = |j: &usize| self.cards[*j].info.kind() == card.info.kind();
            if (0..i).any(|j| alike(&j)) {
                continue;
            }
            let kind: Vec<usize> = (i..self.cards.len()).filter(alike).collect();
            let most = kind.iter().map(|&j| self.vram(j)).max().unwrap_or(0);
            let mut group: Vec<usize> = Vec::new();
            for j in kind {
                let reaches = group.iter().all(|&other| (self.reach)(&self.cards[other], &self.cards[j]));
                if reaches && group.len() < MAX_RANKS && !are_uneven(&[self.vram(j), most]) {
                    group.push(j);
                }
            }
            ways.extend(counts(group.len()).into_iter().map(|n| self.expect(group[..n].to_vec(), How::Width)));
        }
        ways
    }

    /// The `first` with one more that holds experts for it, and one more, the fastest before others; those that bring
    /// too little are not kept.
    fn beside(&self, first: &Way) -> Vec<Way> {
        if self.spec.model.moe().is_none() {
            return Vec::new();
        }
        let mut others: Vec<usize> = (0..self.cards.len()).filter(|i| *i != first.cards[0]).collect();
        others.sort_by(|&a, &b| self.cards[b].rates.vram_bytes.total_cmp(&self.cards[a].rates.vram_bytes));
        let (mut kept, mut ways) = (first.clone(), Vec::new());
        for other in others {
            let way = self.expect([&kept.cards[..], &[other]].concat(), How::Experts);
            if way.is_worth_more_than(&kept) {
                kept = way.clone();
            }
            ways.push(way);
        }
        ways
    }

    /// Layers on two, four and so on, those that may give the most VRAM before others, and on all.
    fn staged(&self) -> Vec<Way> {
        let mut all: Vec<usize> = (0..self.cards.len()).collect();
        all.sort_by_key(|&i| std::cmp::Reverse(self.vram(i)));
        let way = |n: usize| {
            let mut cards = all[..n].to_vec();
            cards.sort_unstable();
            self.expect(cards, How::Layers)
        };
        counts(all.len()).into_iter().map(way).collect()
    }

    /// What was chosen, what was expected of each way, and which GPUs are left alone.
    fn say(&self, best: &Way, first: &Way, several: &[Way]) -> String {
        let mut all: Vec<&Way> = [first].into_iter().chain(several).collect();
        all.sort_by_key(|way| way.cards.len());
        let each = all.iter().filter_map(|way| Some(format!("{}: {}", self.label(way), way.expected.as_ref().ok()?)));
        let each: Vec<String> = each.collect();
        let mut said = format!("of {} GPUs: {}", self.cards.len(), self.label(best));
        said.extend(each.iter().map(|of| format!("; {of}")));
        let left = (0..self.cards.len()).filter(|i| !best.cards.contains(i));
        said.extend(
            left.map(|i| format!("; {} is left alone: {}", self.cards[i].name(), self.why_left(i, best, several))),
        );
        said
    }

    fn why_left(&self, card: usize, best: &Way, several: &[Way]) -> String {
        let with = several.iter().filter(|way| way.cards.contains(&card));
        match with.max_by(|a, b| a.worth().total_cmp(&b.worth())) {
            Some(way) => match &way.expected {
                Ok(expected) => format!("with it, as {}, {expected}", self.label(way)),
                Err(why) => why.clone(),
            },
            None => {
                let (first, one) = (&self.cards[best.cards[0]], &self.cards[card]);
                let apart = match () {
                    () if one.info.kind() != first.info.kind() => "is of another kind",
                    () if !(self.reach)(first, one) => "has no access to the others' memory",
                    () => "has too little free VRAM for an equal share",
                };
                format!("it {apart}, and this model has no experts that it could hold")
            }
        }
    }

    fn label(&self, way: &Way) -> String {
        let numbers = |cards: &[usize]| {
            let numbers: Vec<String> = cards.iter().map(|&i| self.cards[i].number.to_string()).collect();
            format!("cuda:{}", numbers.join(","))
        };
        match (way.how, way.cards.len()) {
            (How::Width, _) => format!("a share on each of {}", numbers(&way.cards)),
            (How::Layers, _) => format!("some layers on each of {}", numbers(&way.cards)),
            (How::Experts, 1) => format!("{} alone", numbers(&way.cards)),
            (How::Experts, _) => format!("{} with experts on {}", numbers(&way.cards[..1]), numbers(&way.cards[1..])),
        }
    }
}

/// A plan, or why there is none.
fn planned<T>(attempt: Result<std::result::Result<T, Short>>) -> std::result::Result<T, String> {
    match attempt {
        Ok(Ok(plan)) => Ok(plan),
        Ok(Err(Short::Vram(bytes))) => Err(format!("{:.1} GiB of VRAM are needed", gib(bytes))),
        Ok(Err(Short::Ram { needed, .. })) => Err(format!("{:.1} GiB of RAM are needed", gib(needed))),
        Err(error) => Err(without_remedy(&error)),
    }
}

impl Split {
    /// Whether several GPUs may share a model so.
    fn allows(self, how: How) -> bool {
        match self {
            Split::Auto => true,
            Split::Width => how == How::Width,
            Split::Experts => how == How::Experts,
            Split::Layers => how == How::Layers,
        }
    }
}

/// What is wrong with GPUs together, without what to do about those that were named.
pub(super) fn without_remedy(error: &Error) -> String {
    error.to_string().split(": give one").next().unwrap_or_default().into()
}

/// What all of them have: shares are equal.
pub(super) fn least<'a>(infos: impl Iterator<Item = &'a DeviceInfo>) -> DeviceInfo {
    let less = |a: DeviceInfo, b: &DeviceInfo| DeviceInfo {
        total_bytes: a.total_bytes.min(b.total_bytes),
        free_bytes: a.free_bytes.min(b.free_bytes),
        ..a
    };
    let mut infos = infos;
    let first = infos.next().expect("there is a GPU").clone();
    infos.fold(first, less)
}

/// Whether what GPUs may take is so different that equal shares would waste it.
pub(super) fn are_uneven(vram: &[u64]) -> bool {
    let (least, most) = (vram.iter().min().copied().unwrap_or(0), vram.iter().max().copied().unwrap_or(0));
    least < most / 4 * 3
}

/// Two, four and so on, and all.
fn counts(all: usize) -> Vec<usize> {
    let twos = (1..).map(|i| 1 << i).take_while(|n| *n < all);
    twos.chain((all > 1).then_some(all)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EngineConfig;
    use crate::load::{Kept, machine};
    use crate::machine::topology::Topology;
    use crate::model::families::shapes;

    /// Name, compute capability, multiprocessors, GiB, and GB/s of memory and link.
    type Kind = (&'static str, (i32, i32), usize, u64, f64, f64);

    const H100: Kind = ("H100", (9, 0), 132, 80, 2900.0, 54.0);
    const RTX_4090: Kind = ("RTX 4090", (8, 9), 128, 24, 900.0, 25.0);
    const RTX_3060: Kind = ("RTX 3060", (8, 6), 28, 12, 310.0, 25.0);
    const A400: Kind = ("RTX A400", (8, 6), 6, 4, 80.0, 6.0);

    /// What is chosen for a shape of these GPUs, of which so many GiB are free, beside 16 cores.
    fn chosen(shape: &str, cards: &[(Kind, u64)], reaches: bool) -> String {
        let card =
            |(number, &((name, capability, multiprocessors, total, vram, link), free)): (usize, &(Kind, u64))| {
                let (name, shared_bytes, total_bytes, free_bytes) = (name.into(), 0, total << 30, free << 30);
                let info = DeviceInfo { name, capability, multiprocessors, shared_bytes, total_bytes, free_bytes };
                let products = products(&info);
                Card { number, info, rates: HolderRates { vram_bytes: 1e9 * vram, products, link_bytes: 1e9 * link } }
            };
        let cards: Vec<Card> = cards.iter().enumerate().map(card).collect();
        let (model, config) = (shapes::shape(shape, None).unwrap(), EngineConfig::default());
        let spec = Spec::new(&model, &config, Kept::NOTHING).unwrap();
        let machine = Machine { available_bytes: 512 << 30, ..machine(&config, &Topology::read()).unwrap() };
        let cpu = CpuRates { read_bytes: 140e9, dense_products: 2e12, expert_products: 1.5e12 };
        let reach = |_: &Card, _: &Card| reaches;
        Ways { spec: &spec, machine: &machine, cpu: &cpu, cards: &cards, reach: &reach }.choose().1
    }

    #[test]
    fn gpus_that_are_worth_it_are_used_and_others_left_alone_by_name() {
        let (small, large) = ("qwen3-30b-a3b", "qwen3-235b-a22b");
        let full = |card: Kind| (card, card.3);
        let without = "is left alone: all experts are in VRAM without it";
        for (shape, cards, reaches, way, left) in [
            (small, vec![full(H100); 2], true, "a share on each of cuda:0,1", ""),
            (large, vec![full(H100); 4], true, "a share on each of cuda:0,1,2,3", ""),
            // Small, and slow.
            (small, vec![full(H100), full(A400)], true, "cuda:0 alone", without),
            (
                large,
                vec![full(H100), full(A400)],
                true,
                "cuda:0 alone",
                "cuda:1 (RTX A400, 4.0 GiB) is left alone: with",
            ),
            (
                large,
                vec![full(A400), full(H100)],
                true,
                "cuda:1 alone",
                "cuda:0 (RTX A400, 4.0 GiB) is left alone: with",
            ),
            (large, vec![full(H100), full(A400), full(H100)], true, "a share on each of cuda:0,2", "cuda:1 (RTX A400"),
            // Older, but worth it.
            (large, vec![full(RTX_4090), full(RTX_3060)], true, "cuda:0 with experts on cuda:1", ""),
            // They do not reach each other's memory.
            (small, vec![full(RTX_4090); 2], false, "cuda:0 alone", without),
            (large, vec![full(RTX_4090); 2], false, "cuda:0 with experts on cuda:1", ""),
            (
                large,
                vec![full(RTX_4090); 4],
                false,
                "cuda:0 with experts on cuda:1,2",
                "cuda:3 (RTX 4090, 24.0 GiB) is",
            ),
            // One is busy, to some part or all of it.
            (large, vec![full(H100), (H100, 40)], true, "cuda:0 with experts on cuda:1", ""),
            (
                large,
                vec![(H100, 1), full(H100)],
                true,
                "cuda:1 alone",
                "cuda:0 (H100, 80.0 GiB) is left alone: it has no",
            ),
        ] {
            let said = chosen(shape, &cards, reaches);
            assert!(said.starts_with(&format!("of {} GPUs: {way};", cards.len())), "{said}");
            assert!(said.contains("tok/s in decode"), "{said}");
            let alone = said.matches("is left alone").count();
            assert!(said.contains(left) && (alone == 0) == left.is_empty(), "{left}: {said}");
        }
    }

    #[test]
    fn a_model_that_fits_no_gpu_alone_is_divided() {
        let said = chosen("glm-4.5", &[(RTX_3060, 12); 4], true);
        assert!(said.starts_with("of 4 GPUs: a share on each of"), "{said}");
    }

    #[test]
    fn layers_go_to_several_gpus_where_one_has_no_room_for_what_is_no_expert() {
        for (shape, card, count) in [("qwen3.8-27b", RTX_4090, 3), ("deepseek-v3", RTX_3060, 4)] {
            let said = chosen(shape, &vec![(card, card.3); count], false);
            assert!(said.starts_with(&format!("of {count} GPUs: some layers on each of cuda:0,1")), "{said}");
        }
    }

    #[test]
    fn a_dense_model_leaves_alone_what_cannot_have_a_share() {
        let said = chosen("qwen3.8-27b", &[(H100, 80), (RTX_4090, 24)], true);
        assert!(said.contains("it is of another kind, and this model has no experts that it could hold"), "{said}");
    }

    #[test]
    fn shares_are_on_two_four_and_all() {
        assert_eq!((counts(1), counts(2), counts(4), counts(6)), (vec![], vec![2], vec![2, 4], vec![2, 4, 6]));
    }
}

//! What a pass moves and computes, and how fast the machine's parts could do each.

use crate::experts::Traffic;
use crate::model::{LayerConfig, ModelConfig};

/// Bytes and operations.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PassWork {
    /// Bytes of RAM that cores read; what crosses the link is not among them.
    pub(super) ram: f64,
    /// Bytes that cross PCIe.
    pub(super) link: f64,
    /// Bytes that the device's memory gives.
    pub(super) vram: f64,
    /// Operations of matrix products on the device, two to a weight and a token.
    pub(super) products: f64,
}

/// The same in a second.
pub(super) type Speed = PassWork;

impl PassWork {
    /// Of `passes` passes over `tokens` tokens in all. `dense`: bytes of dense weights that a pass reads, on the device
    /// if `on_device`; experts there: `resident` bytes.
    pub(super) fn new(traffic: Traffic, dense: f64, resident: f64, products: f64, on_device: bool) -> Self {
        let (ram, link) = (traffic.ram as f64, traffic.link as f64);
        match on_device {
            true => Self { ram, link, vram: dense + resident, products },
            false => Self { ram: ram + dense, ..Self::default() },
        }
    }

    /// The same where of the device's part only a share counts.
    pub(super) fn on_devices(self, share: f64) -> Self {
        Self { link: share * self.link, vram: share * self.vram, products: share * self.products, ..self }
    }

    /// Seconds that the busiest part takes at least, and which it is.
    pub(super) fn at_least(&self, speed: &Speed) -> (f64, &'static str) {
        let parts = [
            ("ram", self.ram, speed.ram),
            ("link", self.link, speed.link),
            ("vram", self.vram, speed.vram),
            ("products", self.products, speed.products),
        ];
        let seconds =
            |(name, work, speed): (&'static str, f64, f64)| (if work > 0.0 { work / speed } else { 0.0 }, name);
        parts.map(seconds).into_iter().fold((0.0, "ram"), |most, part| if part.0 > most.0 { part } else { most })
    }
}

/// Operations that reading `tokens` tokens of one sequence takes, the output head aside. `model` is what each of
/// `ranks` has, but for routed experts, which are whole.
pub(super) fn products(model: &ModelConfig, ranks: usize, tokens: usize) -> f64 {
    // A token sees itself and those before it.
    let pairs = tokens as f64 * (tokens as f64 + 1.0) / 2.0;
    let layer = |layer: &LayerConfig| {
        let routed = layer.ffn.moe().map_or(0, |moe| moe.products(model.hidden_size));
        let dense = layer.dense_products(model.hidden_size) * tokens as f64;
        let attention = layer.attention.products_per_pair() as f64 * pairs;
        2.0 * (ranks as f64 * (dense + attention) + routed as f64 * tokens as f64)
    };
    model.layers.iter().map(layer).sum()
}

/// Of `experts` experts, how many at least one of `tokens` tokens chooses, if each chooses `top_k` and all are alike.
pub(super) fn distinct(experts: usize, top_k: usize, tokens: usize) -> f64 {
    experts as f64 * (1.0 - (1.0 - top_k as f64 / experts as f64).powf(tokens as f64))
}

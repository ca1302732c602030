//! What experts in RAM cost on the CPU and over PCIe, and how many should cross.

use moebius_cache::pack::ExpertLayout;

/// Seconds that experts in RAM cost, from measured rates.
#[derive(Clone, Copy, Debug)]
pub struct CostModel {
    /// Bytes of experts that the CPU reads in a second.
    pub cpu_bytes: f64,
    /// Products of a weight and an activation that it computes in a second, many tokens to an expert.
    pub cpu_products: f64,
    /// Bytes that cross PCIe in a second.
    pub pcie_bytes: f64,
}

impl CostModel {
    /// What kernels reach of plain reading's bandwidth.
    pub const CPU_SHARE: f64 = 0.9;

    /// Seconds that the CPU takes for one of `all` experts of a layer, in the mean, for a batch of `tokens` with
    /// `top_k` each.
    pub fn cpu_seconds(&self, all: usize, tokens: usize, top_k: usize, layout: &ExpertLayout) -> f64 {
        let weights = layout.weights() as f64;
        let share = top_k as f64 / all as f64;
        let chosen = Self::chosen(all, tokens, top_k);
        (chosen * layout.bytes() as f64 / self.cpu_bytes).max(tokens as f64 * share * weights / self.cpu_products)
    }

    /// The share of `all` experts that at least one of `tokens` tokens chooses, in the mean.
    fn chosen(all: usize, tokens: usize, top_k: usize) -> f64 {
        1.0 - (1.0 - top_k as f64 / all as f64).powi(tokens.min(1 << 20) as i32)
    }

    /// Whether so few experts are chosen that only those should cross.
    pub(super) fn picks(all: usize, tokens: usize, top_k: usize) -> bool {
        Self::chosen(all, tokens, top_k) < 0.7
    }

    /// How many of `experts` to stream for `tokens` tokens with `top_k` each, so that PCIe and CPU end together.
    pub fn streamed(&self, experts: usize, all: usize, tokens: usize, top_k: usize, layout: &ExpertLayout) -> usize {
        let cpu = self.cpu_seconds(all, tokens, top_k, layout);
        let crossing = if Self::picks(all, tokens, top_k) { Self::chosen(all, tokens, top_k) } else { 1.0 };
        let stream = crossing * layout.bytes() as f64 / self.pcie_bytes;
        let together = |n: usize| (n as f64 * stream).max((experts - n) as f64 * cpu);
        // A split costs the hand-over of all hidden states: it must pay.
        let (all_cpu, all_streamed) = (experts as f64 * cpu, experts as f64 * stream);
        let best = (0..=experts).min_by(|&a, &b| together(a).total_cmp(&together(b))).unwrap_or(0);
        match together(best) < 0.85 * all_cpu.min(all_streamed) {
            true => best,
            false if all_cpu <= all_streamed => 0,
            false => experts,
        }
    }
}

#[cfg(test)]
mod tests {
    use moebius_cache::Precision;

    use super::*;

    #[test]
    fn as_many_cross_as_end_together_with_the_cpu() {
        let layout = ExpertLayout::new(256, 128, Precision::int4(64)).unwrap();
        let streamed = |cpu_bytes, pcie_bytes| {
            CostModel { cpu_bytes, cpu_products: f64::INFINITY, pcie_bytes }.streamed(100, 100, 1 << 20, 8, &layout)
        };
        assert_eq!(streamed(1e9, 1e9), 50);
        assert_eq!(streamed(1e9, 3e9), 75);
        assert_eq!([streamed(1e9, 1e7), streamed(1e7, 1e9)], [0, 100], "a split that gains too little is none");
    }
}

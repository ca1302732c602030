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
    /// Where no expert is in RAM.
    pub const NOTHING_IN_RAM: Self = Self { cpu_bytes: 1.0, cpu_products: 1.0, pcie_bytes: 1.0 };

    /// What kernels reach of plain reading's bandwidth.
    pub const CPU_SHARE: f64 = 0.9;

    /// What kernels that multiply with what lies in pinned RAM reach of a copy engine's speed (H200: 46 to 50 of 55
    /// GB/s).
    const LINK_SHARE: f64 = 0.88;

    /// Seconds of a layer's hand-over in decode.
    pub const HANDOFF_S: f64 = 10e-6;

    /// Seconds of a layer in decode that a GPU which reads over the link takes beside that (H200).
    const LINK_S: f64 = 35e-6;

    /// What kernels that write and read hidden states in RAM reach of a link's (two H100: 6.5 ms expected of a layer of
    /// Qwen3-30B with 8,192 tokens, 7.0 measured).
    const HOP_SHARE: f64 = 0.7;

    /// Bytes a second over the links of so many ranks, each with its part of every expert, of which one alone carries
    /// `of_one`. Four H100 took 98 GB/s over two links and 143 to 163 over four, of 54 over one; 163 where the CPU
    /// read 133, so that is no bound.
    pub fn links(ranks: usize, of_one: f64) -> f64 {
        (ranks as f64).powf(0.75) * of_one
    }

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

    /// Experts that the CPU computes in decode while one is read over the link.
    pub fn reads_of_link(&self) -> f64 {
        self.cpu_bytes / self.over_link_bytes()
    }

    /// Bytes a second that kernels read over the link.
    fn over_link_bytes(&self) -> f64 {
        Self::LINK_SHARE * self.pcie_bytes
    }

    /// Seconds that the CPU takes in decode for the `n` experts in RAM, of `bytes` each, that a layer wants.
    pub fn on_cpu_in_decode(&self, n: f64, bytes: f64) -> f64 {
        Self::HANDOFF_S + n * bytes / self.cpu_bytes
    }

    /// Of the `n` experts in RAM, of `bytes` each, that a layer wants in decode: how many the GPU should read over the
    /// link beside the CPU, and seconds of both.
    pub fn in_decode(&self, n: f64, bytes: f64) -> (usize, f64) {
        let link = bytes / self.over_link_bytes();
        let seconds = |by_link: usize| match by_link {
            0 => self.on_cpu_in_decode(n, bytes),
            _ => self.on_cpu_in_decode(n - by_link as f64, bytes).max(Self::LINK_S + by_link as f64 * link),
        };
        let ways = (0..=n as usize).map(|by_link| (by_link, seconds(by_link)));
        ways.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, seconds(0)))
    }

    /// How many of `experts` in RAM, of `bytes` each, cross this link, and then that of each of the `others`, GPUs that
    /// hold `held` more, so that all end together. `numbers` of hidden states go to each of those, in bf16, and come
    /// back, in f32. `None`: it takes less time if all cross this link, those that others hold as well.
    pub fn divided(
        &self,
        (experts, held): (usize, usize),
        bytes: usize,
        numbers: usize,
        others: &[OtherLink],
    ) -> Option<Vec<usize>> {
        let (bytes, out, back) = (bytes as f64, 2.0 * numbers as f64, 4.0 * numbers as f64);
        let mut used: Vec<usize> = (0..others.len()).filter(|&i| others[i].passes).collect();
        let shares = loop {
            let n = others.len() as f64;
            let rate: f64 = used.iter().map(|&i| others[i].bytes).sum::<f64>() + self.pcie_bytes;
            let seconds = (experts as f64 * bytes + n * back + used.len() as f64 * out) / rate;
            let mut shares = vec![0; 1 + others.len()];
            let mut left = experts.saturating_sub(1); // what is in VRAM here is multiplied with the first
            for &i in &used {
                let most = ((seconds * others[i].bytes - out) / bytes).max(0.0) as usize;
                shares[1 + i] = most.min(left);
                left -= shares[1 + i];
            }
            shares[0] = left + experts.min(1);
            match used.iter().position(|&i| shares[1 + i] == 0) {
                Some(idle) => drop(used.remove(idle)),
                None => break shares,
            }
        };
        let hops = self.hop_seconds(numbers, others.iter().map(|other| other.bytes));
        let together = shares[0] as f64 * bytes / self.pcie_bytes + hops;
        // Products run beside copies, not beside hidden states that come and go: these must gain more.
        (together < 0.8 * (experts + held) as f64 * bytes / self.pcie_bytes).then_some(shares)
    }

    /// Seconds that `numbers` of hidden states take to other GPUs, whose links carry so many bytes in a second, and
    /// back: one after the other over this link, beside each other over theirs.
    pub fn hop_seconds(&self, numbers: usize, links: impl Iterator<Item = f64>) -> f64 {
        let (count, slowest) = links.fold((0.0, f64::INFINITY), |(n, least), link| (n + 1.0, least.min(link)));
        6.0 * numbers as f64 * (count / self.pcie_bytes + 1.0 / slowest) / Self::HOP_SHARE
    }
}

/// The link of a GPU that holds experts for another one.
#[derive(Clone, Copy, Debug)]
pub struct OtherLink {
    /// Bytes that cross it in a second.
    pub bytes: f64,
    /// Whether experts that nobody holds may pass through that GPU.
    pub passes: bool,
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

    #[test]
    fn in_decode_cpu_and_link_end_together() {
        let by_link = |cpu_bytes, n| {
            let costs = CostModel { cpu_bytes, cpu_products: 1.0, pcie_bytes: 55e9 };
            let (by_link, seconds) = costs.in_decode(n, 2.43e6);
            assert!(seconds <= costs.on_cpu_in_decode(n, 2.43e6));
            by_link
        };
        // Measured with one H200 and 16 cores: 2 of 8, and of 2.5 none.
        assert_eq!([by_link(110e9, 8.0), by_link(110e9, 2.5), by_link(110e9, 0.0)], [2, 0, 0]);
        assert_eq!([by_link(50e9, 8.0), by_link(400e9, 8.0)], [4, 0]);
    }

    #[test]
    fn links_together_reach_what_was_measured() {
        let near = |ranks, measured: f64| (CostModel::links(ranks, 54e9) / measured - 1.0).abs() < 0.15;
        assert!(near(1, 54e9) && near(2, 98e9) && near(4, 153e9));
    }

    #[test]
    fn links_of_several_gpus_end_together() {
        let costs = CostModel { cpu_bytes: 1.0, cpu_products: 1.0, pcie_bytes: 10e9 };
        let divided = |held, numbers, links: &[f64]| {
            let other = |&bytes: &f64| OtherLink { bytes: bytes.abs(), passes: bytes > 0.0 };
            let others: Vec<_> = links.iter().map(other).collect();
            costs.divided((100, held), 1_000_000, numbers, &others)
        };
        assert_eq!(divided(1, 0, &[10e9]).unwrap(), [50, 50]);
        assert_eq!(divided(1, 0, &[5e9, -5e9, 5e9]).unwrap(), [50, 25, 0, 25]);
        // 2 MB to the other one, and 4 back.
        assert_eq!(divided(0, 1_000_000, &[10e9]).unwrap(), [49, 51]);
        assert_eq!(divided(0, 20_000_000, &[10e9]), None, "hidden states cost more than experts save");
        assert_eq!(divided(50, 1_000_000, &[-10e9]).unwrap(), [100, 0], "what is held need not cross");
        assert_eq!(divided(0, 1_000_000, &[-10e9]), None);
    }
}

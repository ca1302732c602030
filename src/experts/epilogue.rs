//! The epilogue of an expert's products: biases, and the activation between the two.

use std::ops::Range;

use crate::Result;
use crate::backend::cpu::activate;
use crate::backend::source::TensorSource;
use crate::backend::tensor::HostTensor;
use crate::kernel::Kernel;
use crate::machine::heap::Heap;
use crate::model::{Activation, ModelConfig};

/// Biases and activation of all layers of a model.
pub struct Epilogue {
    activations: Vec<Activation>, // by MoE layer; none: SiLU
    biases: Vec<Biases>,          // by MoE layer; empty: there are none
}

/// The biases of one layer.
struct Biases {
    gate: RowBias,
    up: RowBias,
    down: RowBias,
}

/// One number for each row of each expert's matrix.
pub(super) struct RowBias {
    pub(super) values: Vec<f32>, // [experts, rows]; none where memory is only counted
    pub(super) len: usize,       // experts * rows
    pub(super) rows: usize,
}

impl Default for Epilogue {
    /// SiLU, no biases.
    fn default() -> Self {
        Self { activations: Vec::new(), biases: Vec::new() }
    }
}

impl Epilogue {
    /// As the model has it, counted by `heap`. Errors: a tensor is missing, misshapen or not finite.
    pub fn load(heap: &Heap, source: &dyn TensorSource, model: &ModelConfig) -> Result<Self> {
        let biased = model.moe_layers().filter(|(_, moe)| moe.expert_bias);
        let biases = biased.map(|(layer, moe)| {
            let (width, hidden) = (moe.intermediate_size, model.hidden_size);
            let bias = |part: &str, rows| {
                source.numbers(&format!("{}.{part}_bias", model.names.experts_of(layer)), &[moe.num_experts, rows])
            };
            // As gpt-oss comes, gates and ups in turn; or each for itself.
            let (gate, up) = match bias("gate_up_proj", 2 * width) {
                Ok(both) => {
                    let both = both.reshaped(1);
                    let every_second = |from| both.head_rows(moe.num_experts * width, from, from + 1);
                    (every_second(0), every_second(1))
                }
                Err(missing) => match (bias("gate_proj", width), bias("up_proj", width)) {
                    (Ok(gate), Ok(up)) => (gate, up),
                    _ => return Err(missing),
                },
            };
            let of =
                |bias: HostTensor<'_>, rows| RowBias { len: moe.num_experts * rows, values: bias.keep(heap), rows };
            Ok(Biases { gate: of(gate, width), up: of(up, width), down: of(bias("down_proj", hidden)?, hidden) })
        });
        let biases = biases.collect::<Result<_>>()?;
        Ok(Self { activations: model.moe_layers().map(|(_, moe)| moe.activation).collect(), biases })
    }

    /// Each MoE layer's own, as of a model that has no other.
    pub fn of_layers(self) -> impl Iterator<Item = Self> {
        let mut biases = self.biases.into_iter();
        let of_layer =
            move |activation| Self { activations: vec![activation], biases: biases.next().into_iter().collect() };
        self.activations.into_iter().map(of_layer)
    }

    /// Of `gate`, `up` and `down` of a MoE layer, `[experts, rows]` each. `None`: there are none.
    #[cfg(feature = "cuda")]
    pub(super) fn biases(&self, layer: usize) -> Option<[&RowBias; 3]> {
        self.biases.get(layer).map(|Biases { gate, up, down }| [gate, up, down])
    }

    /// What follows the biases of `gate` and `up` in a MoE layer.
    pub(super) fn activation(&self, layer: usize) -> Activation {
        self.activations.get(layer).copied().unwrap_or(Activation::Silu)
    }

    /// `out = activation(gate + bias, up + bias)` for some rows of an expert's `gate` and `up`; all `[tokens, width]`,
    /// of which the last columns may be of no row.
    pub(super) fn activate(
        &self,
        kernel: &dyn Kernel,
        (layer, expert): (usize, usize),
        rows: &Range<usize>,
        width: usize,
        (gate, up, out): (&mut [f32], &mut [f32], &mut [f32]),
    ) {
        if let Some(biases) = self.biases.get(layer) {
            biases.gate.add(expert, rows, width, gate);
            biases.up.add(expert, rows, width, up);
        }
        activate(kernel, self.activation(layer), gate, up, out);
    }

    /// `out = activation(up)` of an expert without a gate.
    pub(super) fn activate_ungated(&self, kernel: &dyn Kernel, layer: usize, up: &[f32], out: &mut [f32]) {
        activate(kernel, self.activation(layer), up, up, out);
    }

    /// Adds the bias to some rows of an expert's `down`, `[tokens, width]`.
    pub(super) fn finish(&self, (layer, expert): (usize, usize), rows: &Range<usize>, width: usize, y: &mut [f32]) {
        if let Some(biases) = self.biases.get(layer) {
            biases.down.add(expert, rows, width, y);
        }
    }
}

impl RowBias {
    #[cfg(feature = "cuda")]
    pub(super) fn experts(&self) -> usize {
        self.len / self.rows
    }

    /// Of some rows of every expert.
    #[cfg(feature = "cuda")]
    pub(super) fn of_rows(&self, rows: Range<usize>) -> Vec<f32> {
        self.values.chunks_exact(self.rows).flat_map(|expert| &expert[rows.clone()]).copied().collect()
    }

    fn add(&self, expert: usize, rows: &Range<usize>, width: usize, values: &mut [f32]) {
        let bias = &self.values[expert * self.rows..][rows.clone()];
        for token in values.chunks_exact_mut(width) {
            token.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
        }
    }
}

//! Gated DeltaNet's tensors, in the arrangements that checkpoints have them in.
//!
//! ```text
//! in_proj_qkvz, in_proj_ba                       rows by key head: Qwen3-Next
//! in_proj_qkv, in_proj_z, in_proj_b, in_proj_a   Qwen3.5
//! in_proj_qkv, in_proj_z, in_proj_ba             GGUF of Qwen3-Next; the oldest have in_proj_qkvz
//! A = -exp(A_log)                                GGUF
//! value heads tiled                              GGUF of Qwen3.5
//! ```

use crate::backend::source::LinearWeight;
use crate::backend::tensor::HostTensor;
use crate::backend::{Backend, DeltaRule};
use crate::config::DenseBits;
use crate::forward::loader::Loader;
use crate::model::{DeltaNet, Share};
use crate::{Error, Result};

/// On their way to a device.
pub(super) struct Tensors<'a> {
    pub(super) qkv: LinearWeight<'a>, // [conv_dim, hidden]
    pub(super) z: LinearWeight<'a>,   // [value_dim, hidden]
    pub(super) o: LinearWeight<'a>,   // [hidden, value_dim]
    pub(super) rule: DeltaRule<'a>,
    /// Whether `o` reads value heads in the order of a file that has them tiled.
    pub(super) tiled: bool,
}

/// Those of the layer part `name`.
pub(super) fn read<'a, B: Backend>(loader: &Loader<'a, B>, name: &str, a: &DeltaNet) -> Result<Tensors<'a>> {
    let (hidden, heads, groups) = (loader.model.hidden_size, a.num_value_heads, a.num_key_heads);
    let has = |which: &str| loader.source.has(&format!("{name}.{which}"));
    let matrix = |which: &str, rows, cols| loader.source.matrix(&format!("{name}.{which}.weight"), rows, cols);
    let stored = |which: &str, rows, cols| loader.source.stored(&format!("{name}.{which}.weight"), rows, cols);
    let vector = |which: &str, len| loader.source.vector(&format!("{name}.{which}"), len);
    let (qkv, z) = if has("in_proj_qkvz.weight") {
        let (dim, values) = (a.key_head_dim, a.value_dim() / groups);
        let group = 2 * (dim + values);
        let rows = |from: usize, len: usize| (0..groups).flat_map(move |i| i * group + from..i * group + from + len);
        let of = |rows: Vec<usize>| {
            let qkvz = stored("in_proj_qkvz", a.conv_dim() + a.value_dim(), hidden)?;
            Ok::<_, Error>(qkvz.rows_by(&rows))
        };
        let qkv = rows(0, dim).chain(rows(dim, dim)).chain(rows(2 * dim, values));
        (of(qkv.collect())?, of(rows(2 * dim + values, values).collect())?)
    } else {
        (stored("in_proj_qkv", a.conv_dim(), hidden)?, stored("in_proj_z", a.value_dim(), hidden)?)
    };
    let [beta, alpha] = if has("in_proj_ba.weight") {
        let (ba, of_group) = (matrix("in_proj_ba", 2 * heads, hidden)?, heads / groups);
        [ba.head_rows(groups, 0, of_group), ba.head_rows(groups, of_group, 2 * of_group)]
    } else {
        [matrix("in_proj_b", heads, hidden)?, matrix("in_proj_a", heads, hidden)?]
    };
    let gates = HostTensor::stacked(&[beta, alpha]);
    let rates = loader.rates(name, heads)?;
    let conv = loader.source.numbers(&format!("{name}.conv1d.weight"), &[a.conv_dim(), 1, a.conv_width])?;
    let o = stored("out_proj", hidden, a.value_dim())?;
    let rule = DeltaRule {
        conv,
        gates,
        rates,
        dt_bias: vector("dt_bias", heads)?,
        norm: vector("norm.weight", a.value_head_dim)?,
        eps: loader.model.norm_eps,
    };
    // Quantized inputs of `o` share scales across heads, so they stay where they are.
    let tiled = a.tiled
        && loader.bits == DenseBits::Auto
        && o.held().is_some()
        && loader.share.is_whole()
        && loader.backend.gives_tiled_heads();
    let tensors = Tensors { qkv, z, o, rule, tiled };
    // In whatever order heads are, they take the same memory.
    let tensors = match a.tiled && !loader.backend.is_plan() {
        true => untiled(a, tensors)?,
        false => tensors,
    };
    if loader.share.is_whole() { Ok(tensors) } else { of_rank(a, loader.share, tensors) }
}

impl<'a> Tensors<'a> {
    /// What there is for these channels of query, key and value, gates, value heads, and their values. Errors: as
    /// [`LinearWeight::plain`].
    fn picked(self, channels: &[usize], gates: &[usize], heads: &[usize], values: &[usize]) -> Result<Self> {
        let mut picked = self.picked_rows(channels, gates, heads, values);
        picked.o = picked.o.plain()?.cols_by(values).into();
        Ok(picked)
    }

    /// The same with all columns of the last projection.
    fn picked_rows(self, channels: &[usize], gates: &[usize], heads: &[usize], values: &[usize]) -> Self {
        let Self { qkv, z, o, rule, tiled } = self;
        let rule = DeltaRule {
            conv: rule.conv.rows_by(channels),
            gates: rule.gates.rows_by(gates),
            rates: rule.rates.rows_by(heads),
            dt_bias: rule.dt_bias.rows_by(heads),
            ..rule
        };
        Self { qkv: qkv.rows_by(channels), z: z.rows_by(values), o, rule, tiled }
    }
}

/// A rank's heads.
fn of_rank<'a>(a: &DeltaNet, share: Share, tensors: Tensors<'a>) -> Result<Tensors<'a>> {
    let (keys, per_key) = (share.run(a.num_key_heads), a.num_value_heads / a.num_key_heads);
    // What there is of `width` for each value head, behind `before` of something else.
    let of = |before: usize, width: usize| before + keys.start * per_key * width..before + keys.end * per_key * width;
    let all_keys = a.num_key_heads * a.key_head_dim;
    let of_keys = |before: usize| before + keys.start * a.key_head_dim..before + keys.end * a.key_head_dim;
    let channels: Vec<usize> = of_keys(0).chain(of_keys(all_keys)).chain(of(2 * all_keys, a.value_head_dim)).collect();
    let (of_heads, values): (Vec<usize>, Vec<usize>) = (of(0, 1).collect(), of(0, a.value_head_dim).collect());
    let of_gates: Vec<usize> = of(0, 1).chain(of(a.num_value_heads, 1)).collect();
    tensors.picked(&channels, &of_gates, &of_heads, &values)
}

/// The value heads of a key head beside each other, but for an `o` that reads tiled ones.
fn untiled<'a>(a: &DeltaNet, tensors: Tensors<'a>) -> Result<Tensors<'a>> {
    let (keys, heads) = (a.num_key_heads, a.num_value_heads);
    // What is there for each value head, `width` of it, behind what is not.
    let order = |before: usize, width: usize| -> Vec<usize> {
        let heads = (0..keys).flat_map(|key| (key..heads).step_by(keys));
        (0..before).chain(heads.flat_map(|head| before + head * width..before + (head + 1) * width)).collect()
    };
    let (of_heads, values, channels) =
        (order(0, 1), order(0, a.value_head_dim), order(2 * keys * a.key_head_dim, a.value_head_dim));
    let of_gates: Vec<usize> =
        [0, heads].iter().flat_map(|from| of_heads.iter().map(move |head| from + head)).collect();
    match tensors.tiled {
        true => Ok(tensors.picked_rows(&channels, &of_gates, &of_heads, &values)),
        false => tensors.picked(&channels, &of_gates, &of_heads, &values),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiled_value_heads_go_beside_each_other() {
        let a = DeltaNet {
            num_key_heads: 2,
            num_value_heads: 6,
            key_head_dim: 1,
            value_head_dim: 2,
            conv_width: 2,
            gate: crate::model::DeltaGate::Silu,
            tiled: true,
        };
        // Where heads of the model lie in the file: the first of each key head, the second, the third.
        let heads = [0, 2, 4, 1, 3, 5];
        let values: Vec<f32> = heads.iter().flat_map(|&head| [20 * head, 20 * head + 10]).map(|x| x as f32).collect();
        let channels: Vec<f32> = [-4.0, -3.0, -2.0, -1.0].into_iter().chain(values.iter().copied()).collect();
        let rows = |n: usize, from: i32| -> Vec<f32> { (0..n).map(|i| (from + 10 * i as i32) as f32).collect() };
        let file_channels: Vec<f32> = [-4.0, -3.0, -2.0, -1.0].into_iter().chain(rows(12, 0)).collect();
        let matrix = |data: Vec<f32>, cols| HostTensor::F32 { data: data.into(), cols };
        let twice = |data: &[f32]| -> Vec<f32> { data.iter().flat_map(|x| [*x, *x + 0.5]).collect() };
        let rule = DeltaRule {
            conv: matrix(twice(&file_channels), 2),
            gates: matrix(twice(&rows(12, 0)), 2),
            rates: rows(6, 0).into(),
            dt_bias: rows(6, 5).into(),
            norm: vec![7.0, 8.0].into(),
            eps: 1e-6,
        };
        let o = [rows(12, 0), rows(12, 1)].concat();
        let file = Tensors {
            qkv: matrix(file_channels.clone(), 1).into(),
            z: matrix(twice(&rows(12, 0)), 2).into(),
            o: matrix(o, 12).into(),
            rule,
            tiled: false,
        };
        let Tensors { qkv, z, o, rule, .. } = untiled(&a, file).unwrap();
        let [qkv, z, o] = [qkv, z, o].map(|weight| weight.plain().unwrap());
        assert_eq!(qkv.to_f32(), channels);
        assert_eq!(rule.conv.to_f32(), twice(&channels));
        assert_eq!(z.to_f32(), twice(&values));
        assert_eq!(o.to_f32(), [values.clone(), values.iter().map(|x| x + 1.0).collect()].concat());
        let of_heads = |from: f32| -> Vec<f32> { heads.iter().map(|&head| 10.0 * head as f32 + from).collect() };
        let vectors = [rule.rates, rule.dt_bias, rule.norm].map(|vector| vector.to_f32().into_owned());
        assert_eq!(vectors, [of_heads(0.0), of_heads(5.0), vec![7.0, 8.0]]);
        assert_eq!(rule.gates.to_f32(), twice(&[of_heads(0.0), of_heads(60.0)].concat()));
    }
}

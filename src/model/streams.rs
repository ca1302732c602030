//! Several residual streams: what mixes them into what a layer's part reads; and what n-grams add to them.

use std::sync::Arc;

use super::attention::{Matrix, StateShape};

/// The residual streams of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamShape {
    /// Streams.
    pub streams: usize,
    /// Numbers of each.
    pub hidden_size: usize,
}

impl StreamShape {
    /// Numbers of all.
    pub fn width(self) -> usize {
        self.streams * self.hidden_size
    }

    /// The shape of `rows` rows of them: with a dimension for the streams where there are several.
    pub fn rows(self, rows: usize) -> Vec<usize> {
        match self.streams {
            1 => vec![rows, self.hidden_size],
            streams => vec![rows, streams, self.hidden_size],
        }
    }
}

/// A gated mixture of low rank. Source: HF modeling_qwen4_exp.
///
/// ```text
/// n  = each stream's rms norm                    a  = sigmoid(up silu((down n) / count))
/// in = 1/count sum over streams of a_s * n_s     x_s += 2 sigmoid((inject n)_s / count) part(in)
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mixer {
    /// Streams.
    pub count: usize,
    /// Rows of `down`.
    pub rank: usize,
}

impl Mixer {
    /// Rows of `down`, then those of `inject`, in whole eights as a GPU has them.
    pub fn gate_rows(&self) -> usize {
        (self.rank + self.count).next_multiple_of(8)
    }

    /// Its matrices in a model of this width.
    pub fn matrices(&self, hidden: usize) -> [Matrix; 2] {
        let width = self.count * hidden;
        [(self.gate_rows(), width), (width, self.rank)]
    }
}

/// Hyper-connections: what a part reads of the streams, what each of these gets of its result, and how they mix,
/// are made of all streams. Source: HF modeling_glm5_next.
///
/// ```text
/// m  = fn rms(all streams)                        of which `count`, `count` and `count * count` numbers
/// pre = sigmoid(scale_0 m + base) + eps;          post = 2 sigmoid(scale_1 m + base)
/// C  = softmax of each row (scale_2 m + base) + eps, then columns and rows are divided by their sums in turn
/// x_k = post_k part(norm(sum over s of pre_s x_s)) + sum over j of C_jk x_j
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Connections {
    /// Streams.
    pub count: usize,
    /// Times that columns are divided.
    pub iterations: usize,
    /// Added where something is divided by.
    pub eps: f32,
    /// What the output head reads the norm of.
    pub last: LastRead,
}

/// What the output head makes of connected streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastRead {
    /// Their mean.
    Mean,
    /// `sum over s of pre_s x_s`, `pre` as that of a part. Source: HF modeling_deepseek_v4.
    Shares,
    /// The same with the last connection's `pre`, as every part reads with that of the connection before its own; the
    /// first part reads the first stream. Source: mlx-vlm, deepseek_v41.
    Ahead,
}

impl Connections {
    /// Rows of `fn`.
    pub fn rows(&self) -> usize {
        self.count * (2 + self.count)
    }

    /// What the GPU's kernels lack for them, if anything.
    pub fn gpu_lacks(&self) -> Option<String> {
        // Rows of shares that the head reads by are copied by fours.
        let fits = self.count <= 4 && (self.last != LastRead::Ahead || self.rows().is_multiple_of(4));
        (!fits).then(|| {
            format!("the GPU connects 2 to 4 residual streams, of models that look ahead 4, not {}", self.count)
        })
    }
}

/// Rows of a table that hashes of a token and those before it choose, added to the residual streams at the layer's
/// start. Source: HF modeling_qwen4_exp, `Qwen4ExpTextPLELayer`.
///
/// ```text
/// hash_n = (t0 * m0) xor (t1 * m1) xor ... of n tokens, t0 the token itself
/// E      = the rows hash_n mod size_e + offset_e of all heads e, joined
/// g_s    = norm(key E)_s . norm(x)_s / sqrt(hidden);   u_s = sigmoid(sign(g_s) sqrt(|g_s|)) value E
/// x     += u + silu(convolution of norm(u)), whose taps are `max_tokens` positions apart
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ngrams {
    /// Tokens of the longest n-gram; the shortest has two.
    pub max_tokens: usize,
    /// Rows for each length.
    pub heads: usize,
    /// Numbers of a row.
    pub row_dim: usize,
    /// Inputs of the convolution; `None`: there is none, and `u` is added alone.
    pub conv_width: Option<usize>,
    /// What no n-gram goes across.
    pub end_token: u32,
    /// What stands for tokens beyond one, and beyond the sequence's start.
    pub filler: u32,
    /// Tokens that are alike count as one: how many there are then; `None`: each counts as itself.
    pub kinds: Option<usize>,
    /// What each token counts as, by its id, where the tokenizer was asked.
    pub alike: Option<Arc<[u32]>>,
    /// Rows of the table, about.
    pub table_rows: usize,
    /// What hashes are made with, where the checkpoint has no tensors of it.
    pub hash: Option<Hash>,
}

/// What makes rows of hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hash {
    /// Of each token, the newest first.
    pub multipliers: Vec<i64>,
    /// Rows of each head.
    pub sizes: Vec<i64>,
    /// First row of each head.
    pub offsets: Vec<i64>,
}

impl Ngrams {
    /// Rows of a token.
    pub fn rows(&self) -> usize {
        (self.max_tokens - 1) * self.heads
    }

    /// Numbers of all rows of a token.
    pub fn width(&self) -> usize {
        self.rows() * self.row_dim
    }

    /// Its matrices, in a model of this width with so many streams: `key` and `value`.
    pub fn matrices(&self, hidden: usize, streams: usize) -> [Matrix; 2] {
        [(streams * hidden, self.width()), (hidden, self.width())]
    }

    /// What a sequence keeps.
    pub fn state(&self, hidden: usize, streams: usize) -> Option<StateShape> {
        let past_inputs = (self.conv_width? - 1) * self.max_tokens;
        Some(StateShape { past_inputs, channels: streams * hidden, numbers: 0 })
    }
}

impl Hash {
    /// The table's rows of the newest of `tokens`, the newest first; `out` has one for each head. Source: HF
    /// modeling_qwen4_exp, `Qwen4ExpTextNGramEmbedding`.
    pub fn rows(&self, tokens: &[u32], out: &mut [usize]) {
        let of_length = self.sizes.len() / (tokens.len() - 1);
        let mut hash = i64::from(tokens[0]).wrapping_mul(self.multipliers[0]);
        for (n, token) in tokens.iter().enumerate().skip(1) {
            hash ^= i64::from(*token).wrapping_mul(self.multipliers[n]);
            for head in (n - 1) * of_length..n * of_length {
                out[head] = (hash.rem_euclid(self.sizes[head]) + self.offsets[head]) as usize;
            }
        }
    }

    /// Why no table of so many rows has the rows that it makes; `None`: it has.
    pub fn wrong(&self, table_rows: usize) -> Option<String> {
        let rows = |(size, offset): (&i64, &i64)| {
            (*size > 0 && *offset >= 0)
                .then(|| offset.checked_add(*size))
                .flatten()
                .is_some_and(|end| usize::try_from(end).is_ok_and(|end| end <= table_rows))
        };
        let fits = self.sizes.iter().zip(&self.offsets).all(rows);
        (!fits).then(|| format!("n-grams need other rows than the {table_rows} of their table"))
    }
}

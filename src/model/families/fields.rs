//! Typed, bounded access to the fields of a `config.json`, in the hub's style and in that of transformers 5.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::model::{Bias, Ffn, Gqa, Llama3, Mlp, PositionScale, QkNorm, Rope, RopeScaling, Yarn};
use crate::{Error, Result};

/// No dimension of a real model is larger; a lying config must not make us allocate.
const MAX_DIM: u64 = 1 << 24;
/// Rows of a table that stays in its file.
const MAX_TABLE_ROWS: u64 = 1 << 32;
pub(super) const MAX_LAYERS: u64 = 1 << 12;
const MAX_EXPERTS: u64 = 1 << 16;
const MAX_TOP_K: u64 = 1 << 8;
/// Heads and their widths, where a product of several is memory.
const MAX_HEADS: u64 = 1 << 12;
/// Inputs of a short convolution: what a sequence keeps grows with it.
pub(super) const CONV_WIDTHS: RangeInclusive<usize> = 2..=64;

/// A JSON object whose fields are read with an error that names them. `null` counts as absent.
pub(super) struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(super) fn new(json: &'a Value) -> Result<Self> {
        json.as_object().map(Fields).ok_or_else(|| Error::Model("not a JSON object: download it again".into()))
    }

    fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|v| !v.is_null())
    }

    /// Whether it says anything of a field.
    pub(super) fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub(super) fn str(&self, name: &str) -> Result<&'a str> {
        self.get(name).ok_or_else(|| missing(name))?.as_str().ok_or_else(|| wrong(name, "a string"))
    }

    pub(super) fn str_or(&self, name: &str, default: &'a str) -> Result<&'a str> {
        if self.get(name).is_some() { self.str(name) } else { Ok(default) }
    }

    /// A dimension: a positive integer of sane size.
    pub(super) fn dim(&self, name: &str) -> Result<usize> {
        self.up_to(MAX_DIM, &[name])
    }

    /// The first of several names of the same number, from 1 to `max`.
    fn up_to(&self, max: u64, names: &[&str]) -> Result<usize> {
        let (name, value) = names.iter().find_map(|n| Some((*n, self.get(n)?))).ok_or_else(|| missing(names[0]))?;
        match value.as_u64() {
            Some(v) if (1..=max).contains(&v) => Ok(v as usize),
            _ => Err(wrong(name, &format!("an integer from 1 to {max}"))),
        }
    }

    /// A dimension between two.
    pub(super) fn within(&self, name: &str, range: RangeInclusive<usize>) -> Result<usize> {
        match self.dim(name)? {
            n if range.contains(&n) => Ok(n),
            _ => Err(wrong(name, &format!("an integer from {} to {}", range.start(), range.end()))),
        }
    }

    /// Inputs of a short convolution.
    pub(super) fn conv_width(&self, name: &str) -> Result<usize> {
        if self.has(name) { self.within(name, CONV_WIDTHS) } else { Ok(4) }
    }

    /// Rows of a table that stays in its file.
    pub(super) fn table_rows(&self, name: &str) -> Result<usize> {
        self.up_to(MAX_TABLE_ROWS, &[name])
    }

    /// Layers of the model.
    pub(super) fn num_layers(&self) -> Result<usize> {
        self.up_to(MAX_LAYERS, &["num_hidden_layers"])
    }

    /// Routed experts of a layer, by any of these names.
    pub(super) fn num_experts(&self, names: &[&str]) -> Result<usize> {
        self.up_to(MAX_EXPERTS, names)
    }

    /// Routed experts of a token.
    pub(super) fn top_k(&self) -> Result<usize> {
        self.up_to(MAX_TOP_K, &["num_experts_per_tok", "moe_k"])
    }

    /// The same by another name.
    pub(super) fn up_to_top_k(&self, name: &str) -> Result<usize> {
        self.up_to(MAX_TOP_K, &[name])
    }

    /// A number of heads, or their width.
    pub(super) fn heads(&self, name: &str) -> Result<usize> {
        self.up_to(MAX_HEADS, &[name])
    }

    /// Width of one head of grouped queries.
    pub(super) fn head_dim(&self) -> Result<usize> {
        match self.optional_dim("head_dim")? {
            Some(dim) => Ok(dim),
            None => Ok((self.dim("hidden_size")? / self.dim("num_attention_heads")?).max(1)),
        }
    }

    /// Grouped queries with nothing special about them.
    pub(super) fn gqa(&self, rope: Rope) -> Result<Gqa> {
        let num_heads = self.dim("num_attention_heads")?;
        let num_kv_heads = self.dim_or("num_key_value_heads", num_heads)?;
        gqa([num_heads, num_kv_heads, self.head_dim()?], Some(rope))
    }

    /// A dense MLP.
    pub(super) fn dense(&self) -> Result<Ffn> {
        Ok(Ffn::Dense(Mlp::silu(self.dim("intermediate_size")?)))
    }

    /// The rotated width of heads of which a part is rotated; `factor`: that part where the config does not say.
    pub(super) fn rotary_dim(&self, factor: f64) -> Result<usize> {
        let head_dim = self.head_dim()?;
        if let Some(dim) = self.optional_dim("rotary_dim")? {
            return if dim <= head_dim {
                Ok(dim)
            } else {
                Err(wrong("rotary_dim", &format!("at most the {head_dim} of a head")))
            };
        }
        const NAME: &str = "partial_rotary_factor";
        let parameters = self.object("rope_parameters")?;
        let factor = match &parameters {
            Some(p) if p.get(NAME).is_some() => p.f64_or(NAME, factor)?,
            _ => self.f64_or(NAME, factor)?,
        };
        part(head_dim, factor)
    }

    /// A field that must have one value, or be absent. Errors: it has another, which is named with what is supported.
    pub(super) fn expect(&self, name: &str, only: Value) -> Result<()> {
        match self.get(name) {
            Some(value) if *value != only => {
                Err(Error::Model(format!("{name} {value} is not supported for this architecture; {only} is")))
            }
            _ => Ok(()),
        }
    }

    /// A field that must be absent.
    pub(super) fn refuse(&self, name: &str) -> Result<()> {
        self.get(name).map_or(Ok(()), |_| Err(Error::Model(format!("{name} is not supported for this architecture"))))
    }

    pub(super) fn dim_or(&self, name: &str, default: usize) -> Result<usize> {
        if self.get(name).is_some() { self.dim(name) } else { Ok(default) }
    }

    /// A count that may be zero.
    pub(super) fn count_or(&self, name: &str, default: usize) -> Result<usize> {
        match self.get(name).map(|v| v.as_u64()) {
            None => Ok(default),
            Some(Some(v @ 0..=MAX_DIM)) => Ok(v as usize),
            Some(_) => Err(wrong(name, "an integer from 0 to 16777216")),
        }
    }

    /// A dimension that may be absent or null.
    pub(super) fn optional_dim(&self, name: &str) -> Result<Option<usize>> {
        if self.get(name).is_some() { self.dim(name).map(Some) } else { Ok(None) }
    }

    pub(super) fn f64_or(&self, name: &str, default: f64) -> Result<f64> {
        match self.get(name).map(|v| v.as_f64()) {
            None => Ok(default),
            Some(Some(v)) if v.abs() <= f32::MAX.into() => Ok(v),
            Some(_) => Err(wrong(name, "a number")),
        }
    }

    /// Epsilon of the norms.
    pub(super) fn norm_eps(&self) -> Result<f32> {
        self.norm_eps_or(1e-6)
    }

    /// The same; `default`: where the config does not say.
    pub(super) fn norm_eps_or(&self, default: f64) -> Result<f32> {
        const NAMES: [&str; 5] =
            ["rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"];
        let name = NAMES.into_iter().find(|name| self.get(name).is_some()).unwrap_or(NAMES[0]);
        match self.f64_or(name, default)? {
            eps if (0.0..1.0).contains(&eps) => Ok(eps as f32),
            _ => Err(wrong(name, "a number from 0 to 1")),
        }
    }

    /// A number for each layer, null being 0; `None` when absent. Further numbers are of draft layers.
    pub(super) fn each_layer(&self, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = |v: &Value| match v {
            Value::Null => Some(0.0),
            _ => v.as_f64().or(v.as_bool().map(f64::from)).filter(|v| v.abs() <= f32::MAX.into()),
        };
        let list: Option<Vec<f64>> = value.as_array().and_then(|list| list.iter().map(number).collect());
        let num_layers = self.num_layers()?;
        list.filter(|list| list.len() >= num_layers)
            .map(Some)
            .ok_or_else(|| wrong(name, &format!("a number for each of {num_layers} layers")))
    }

    /// The same, of a list or of one number for all layers.
    pub(super) fn each_layer_or(&self, name: &str, default: f64) -> Result<Vec<f64>> {
        match self.get(name).is_some_and(Value::is_array) {
            true => Ok(self.each_layer(name)?.unwrap_or_default()),
            false => Ok(vec![self.f64_or(name, default)?; self.num_layers()?]),
        }
    }

    /// A count of heads for each layer; `None` when absent.
    pub(super) fn heads_of_layers(&self, name: &str) -> Result<Option<Vec<usize>>> {
        let valid = |n: &f64| n.fract() == 0.0 && (1.0..=MAX_HEADS as f64).contains(n);
        match self.each_layer(name)? {
            Some(list) if list.iter().all(valid) => Ok(Some(list.into_iter().map(|n| n as usize).collect())),
            Some(_) => Err(wrong(name, &format!("integers from 1 to {MAX_HEADS}"))),
            None => Ok(None),
        }
    }

    pub(super) fn bool_or(&self, name: &str, default: bool) -> Result<bool> {
        match self.get(name).map(|v| v.as_bool()) {
            None => Ok(default),
            Some(Some(v)) => Ok(v),
            Some(None) => Err(wrong(name, "true or false")),
        }
    }

    /// A list of layer numbers, or a text of them with commas; absent is empty.
    pub(super) fn layers(&self, name: &str) -> Result<Vec<usize>> {
        let Some(value) = self.get(name) else { return Ok(Vec::new()) };
        let list = match value {
            Value::String(text) => {
                let numbers = text.split(',').map(str::trim).filter(|number| !number.is_empty());
                numbers.map(|number| number.parse().ok()).collect()
            }
            _ => value.as_array().and_then(|a| a.iter().map(|v| v.as_u64().map(|v| v as usize)).collect()),
        };
        list.ok_or_else(|| wrong(name, "a list of layer numbers"))
    }

    /// An integer of any sign; `None` when absent.
    pub(super) fn integer(&self, name: &str) -> Result<Option<i64>> {
        self.get(name).map(|v| v.as_i64().ok_or_else(|| wrong(name, "an integer"))).transpose()
    }

    /// A list of integers; `None` when absent.
    pub(super) fn integers(&self, name: &str) -> Result<Option<Vec<i64>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let list = value.as_array().and_then(|list| list.iter().map(Value::as_i64).collect());
        list.map(Some).ok_or_else(|| wrong(name, "a list of integers"))
    }

    /// Of each layer, whether it is the first of two kinds, as `layer_types` says; `None` when absent. Further
    /// ones are draft layers'.
    pub(super) fn layer_kinds(&self, name: &str, kinds: [&str; 2]) -> Result<Option<Vec<bool>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let is_first = |kind: &Value| kind.as_str().filter(|kind| kinds.contains(kind)).map(|kind| kind == kinds[0]);
        let list: Option<Vec<bool>> = value.as_array().and_then(|list| list.iter().map(is_first).collect());
        let num_layers = self.num_layers()?;
        list.filter(|list| list.len() >= num_layers).map(Some).ok_or_else(|| {
            let [first, second] = kinds;
            Error::Model(format!("`{name}` does not say {first} or {second} for each of {num_layers} layers"))
        })
    }

    /// A list of words; `None` when absent.
    pub(super) fn texts(&self, name: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let list: Option<Vec<&str>> = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        list.map(Some).ok_or_else(|| wrong(name, "a list of words"))
    }

    /// A word, or `true` or `false`.
    pub(super) fn flag_or_word(&self, name: &str) -> Result<&'a str> {
        match self.get(name).ok_or_else(|| missing(name))? {
            Value::Bool(true) => Ok("true"),
            Value::Bool(false) => Ok("false"),
            value => value.as_str().ok_or_else(|| wrong(name, "a word")),
        }
    }

    pub(super) fn heads_or(&self, name: &str, default: usize) -> Result<usize> {
        if self.get(name).is_some() { self.heads(name) } else { Ok(default) }
    }

    /// Zero or one for each layer.
    pub(super) fn layer_flags(&self, name: &str) -> Result<Option<Vec<bool>>> {
        self.flags(name, self.num_layers()?)
    }

    /// `count` times zero or one.
    pub(super) fn flags(&self, name: &str, count: usize) -> Result<Option<Vec<bool>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let flag = |v: &Value| v.as_u64().filter(|&v| v <= 1).map(|v| v == 1);
        let list: Option<Vec<bool>> = value.as_array().and_then(|list| list.iter().map(flag).collect());
        let list = list.filter(|list| list.len() == count);
        list.map(Some).ok_or_else(|| wrong(name, &format!("0 or 1 for each of {count} layers")))
    }

    /// Of each layer, which of two kinds a letter says.
    pub(super) fn layer_letters(&self, name: &str, [first, second]: [char; 2]) -> Result<Option<Vec<bool>>> {
        if self.get(name).is_none() {
            return Ok(None);
        }
        let (letters, num_layers) = (self.str(name)?, self.num_layers()?);
        let fits = letters.chars().all(|c| c == first || c == second) && letters.len() == num_layers;
        fits.then(|| Some(letters.chars().map(|c| c == first).collect())).ok_or_else(|| {
            Error::Model(format!("`{name}` does not say {first} or {second} for each of {num_layers} layers"))
        })
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<Fields<'a>>> {
        match self.get(name) {
            None => Ok(None),
            Some(v) => v.as_object().map(|o| Some(Fields(o))).ok_or_else(|| wrong(name, "an object")),
        }
    }

    /// The activation must be the one the kernels have.
    pub(super) fn expect_silu(&self) -> Result<()> {
        match self.str_or("hidden_act", "silu")? {
            "silu" | "swish" => Ok(()),
            other => Err(Error::Model(format!("hidden_act `{other}` is not supported; silu is"))),
        }
    }

    /// The rotary embedding of grouped queries.
    pub(super) fn rope(&self, dim: usize, default_theta: f64) -> Result<Rope> {
        self.rope_and_mscale(dim, false, default_theta).map(|(rope, _)| rope)
    }

    /// The rotary embedding that `rope_parameters` has for the layers of a kind, in heads of `head_dim`.
    pub(super) fn rope_of(&self, kind: &str, head_dim: usize, default_theta: f64) -> Result<Rope> {
        let parameters = self.object("rope_parameters")?.map(|all| all.object(kind)).transpose()?.flatten();
        let Some(p) = parameters else {
            return Err(Error::Model(format!("field `rope_parameters` says nothing of `{kind}` layers")));
        };
        let rotated = part(head_dim, p.f64_or("partial_rotary_factor", 1.0)?)?;
        if p.str_or("rope_type", "default")? == "proportional" {
            let theta = p.f64_or("rope_theta", default_theta)?;
            return checked(Rope {
                dim: head_dim,
                theta,
                interleaved: false,
                scaling: RopeScaling::Proportional { rotated },
            });
        }
        let theta = p.f64_or("rope_theta", default_theta)?;
        let (scaling, _) = self.rope_scaling(Some(p), rotated)?;
        checked(Rope { dim: rotated, theta, interleaved: false, scaling })
    }

    /// The rotary embedding, from `rope_theta` + `rope_scaling` (hub) or `rope_parameters` (transformers 5).
    ///
    /// The second value is the `mscale` that multiplies DeepSeek's softmax scale twice (1 without YaRN).
    pub(super) fn rope_and_mscale(&self, dim: usize, interleaved: bool, default_theta: f64) -> Result<(Rope, f64)> {
        let parameters = self.object("rope_parameters")?;
        let scaling = match &parameters {
            Some(p) => Some(Fields(p.0)),
            None => self.object("rope_scaling")?,
        };
        let theta = match &parameters {
            Some(p) if p.get("rope_theta").is_some() => p.f64_or("rope_theta", default_theta)?,
            _ => self.f64_or("rope_theta", default_theta)?,
        };
        let (scaling, softmax_mscale) = self.rope_scaling(scaling, dim)?;
        Ok((checked(Rope { dim, theta, interleaved, scaling })?, softmax_mscale))
    }

    /// How a rope of `dim` rotated numbers is stretched, and its `mscale`.
    pub(super) fn rope_scaling(&self, fields: Option<Fields<'_>>, dim: usize) -> Result<(RopeScaling, f64)> {
        let Some(s) = fields else { return Ok((RopeScaling::None, 1.0)) };
        match s.str_or("rope_type", s.str_or("type", "default")?)? {
            "default" => Ok((RopeScaling::None, 1.0)),
            "linear" => Ok((RopeScaling::Linear { factor: s.positive("factor")? }, 1.0)),
            "yarn" => s.yarn(self),
            "llama3" => Ok((s.llama3()?, 1.0)),
            "factors" => Ok((s.factors(dim / 2)?, 1.0)),
            other => Err(Error::Model(format!(
                "rope scaling `{other}` is not supported; default, linear, yarn and llama3 are"
            ))),
        }
    }

    /// What multiplies queries by their position, as Mistral's configs say it.
    pub(super) fn position_scale(&self) -> Result<Option<PositionScale>> {
        const BETA: &str = "llama_4_scaling_beta";
        let parameters = match self.object("rope_parameters")? {
            Some(parameters) => Some(parameters),
            None => self.object("rope_scaling")?,
        };
        let Some(parameters) = parameters.filter(|parameters| parameters.get(BETA).is_some()) else { return Ok(None) };
        let length = parameters.dim("original_max_position_embeddings")? as f32;
        Ok(Some(PositionScale { beta: parameters.f64_or(BETA, 0.0)? as f32, length, offset: 0.0 }))
    }

    /// YaRN's fields, in a `whole` config, and its `mscale`.
    fn yarn(&self, whole: &Fields<'_>) -> Result<(RopeScaling, f64)> {
        let factor = self.positive("factor")?;
        let (mscale, all) = (self.f64_or("mscale", 0.0)?, self.f64_or("mscale_all_dim", 0.0)?);
        let attention_factor = if self.get("attention_factor").is_some() {
            self.positive("attention_factor")?
        } else if mscale != 0.0 && all != 0.0 {
            Yarn::mscale(factor, mscale) / Yarn::mscale(factor, all)
        } else {
            Yarn::mscale(factor, 1.0)
        };
        let softmax_mscale = if all != 0.0 { Yarn::mscale(factor, all) } else { 1.0 };
        if !(usable(softmax_mscale) && usable(attention_factor)) {
            return Err(Error::Model(format!(
                "`factor` {factor}, `mscale` {mscale} and `mscale_all_dim` {all} make no usable scale"
            )));
        }
        let original = match self.optional_dim("original_max_position_embeddings")? {
            Some(n) => n,
            None => whole.dim("max_position_embeddings")?,
        };
        let yarn = Yarn {
            factor,
            original_max_position: original as f64,
            beta_fast: self.positive_or("beta_fast", 32.0)?,
            beta_slow: self.positive_or("beta_slow", 1.0)?,
            attention_factor: attention_factor as f32,
            truncate: self.bool_or("truncate", true)?,
        };
        Ok((RopeScaling::Yarn(yarn), softmax_mscale))
    }

    /// Llama 3's fields.
    fn llama3(&self) -> Result<RopeScaling> {
        let (low, high) = (self.positive("low_freq_factor")?, self.positive("high_freq_factor")?);
        if high < low {
            return Err(wrong("high_freq_factor", "at least `low_freq_factor`"));
        }
        Ok(RopeScaling::Llama3(Llama3 {
            factor: self.positive("factor")?,
            original_max_position: self.dim("original_max_position_embeddings")? as f64,
            low_freq_factor: low,
            high_freq_factor: high,
        }))
    }

    /// A factor for each of `count` frequencies. Further ones are of layers that rotate more.
    fn factors(&self, count: usize) -> Result<RopeScaling> {
        let list = self.get("factors").and_then(Value::as_array);
        let factors: Option<Vec<f32>> = list.and_then(|list| list.iter().map(|f| Some(f.as_f64()? as f32)).collect());
        let usable = |factors: &[f32]| factors.iter().all(|f| usable(f64::from(*f)));
        let factors = factors.and_then(|f| f.get(..count).filter(|f| usable(f)).map(<[f32]>::to_vec));
        let factors = factors.ok_or_else(|| wrong("factors", &format!("{count} positive numbers")))?;
        Ok(RopeScaling::Factors(factors))
    }

    fn positive(&self, name: &str) -> Result<f64> {
        match self.get(name).ok_or_else(|| missing(name))?.as_f64() {
            Some(v) if (f32::MIN_POSITIVE.into()..=f32::MAX.into()).contains(&v) => Ok(v),
            _ => Err(wrong(name, "a positive number")),
        }
    }

    pub(super) fn positive_or(&self, name: &str, default: f64) -> Result<f64> {
        if self.get(name).is_some() { self.positive(name) } else { Ok(default) }
    }
}

/// Grouped queries of `num_heads`, `num_kv_heads` and `head_dim` with nothing special about them.
pub(super) fn gqa([num_heads, num_kv_heads, head_dim]: [usize; 3], rope: Option<Rope>) -> Result<Gqa> {
    if num_heads % num_kv_heads != 0 {
        return Err(Error::Model(format!(
            "{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly"
        )));
    }
    Ok(Gqa {
        num_heads,
        num_kv_heads,
        head_dim,
        value_dim: head_dim,
        rope,
        qk_norm: QkNorm::None,
        values_are_keys: false,
        value_norm: false,
        value_scale: 1.0,
        bias: Bias::None,
        fused_parts: None,
        window: None,
        sinks: false,
        output_gate: None,
        scale: 1.0 / (head_dim as f32).sqrt(),
        position_scale: None,
        selection: None,
    })
}

/// Whether a factor leaves numbers that f32 can hold.
fn usable(factor: f64) -> bool {
    (1e-6..=1e6).contains(&factor)
}

/// The rotated numbers of a head that is rotated in part.
pub(super) fn part(head_dim: usize, factor: f64) -> Result<usize> {
    if !(0.0..=1.0).contains(&factor) {
        return Err(wrong("partial_rotary_factor", "a number from 0 to 1"));
    }
    Ok((head_dim as f64 * factor) as usize)
}

/// A rope that can be computed.
pub(super) fn checked(rope: Rope) -> Result<Rope> {
    if rope.dim == 0 || rope.dim % 2 != 0 {
        return Err(Error::Model(format!("the rotated width of a head is {}, not a positive even number", rope.dim)));
    }
    if rope.theta <= 1.0 {
        return Err(wrong("rope_theta", "a number above 1"));
    }
    Ok(rope)
}

pub(super) fn missing(name: &str) -> Error {
    Error::Model(format!("field `{name}` is missing: is this the config of the whole checkpoint?"))
}

pub(super) fn wrong(name: &str, wanted: &str) -> Error {
    Error::Model(format!("field `{name}` is not {wanted}"))
}

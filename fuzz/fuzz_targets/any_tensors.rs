//! Tensors of any shape, type and content under the names of every quantized format: refused, or decoded and packed,
//! without a panic.
//!
//! The first bytes choose the method, and of each tensor whether it is there, its type and its shape; the rest is
//! content.
use moebius_cache::convert::rounding;
use moebius_cache::{Checkpoint, Precision};
use serde_json::{Map, json};

const METHODS: [&str; 12] = [
    r#"{}"#,
    r#"{"quantization_config":{"quant_method":"fp8","weight_block_size":[3,5]}}"#,
    r#"{"quantization_config":{"quant_method":"compressed-tensors",
    "config_groups":{"g":{"weights":{"num_bits":4,"type":"int","symmetric":false}}}}}"#,
    r#"{"quantization_config":{"quant_method":"compressed-tensors",
    "config_groups":{"g":{"weights":{"num_bits":8,"type":"int"}}}}}"#,
    r#"{"quantization_config":{"quant_method":"gptq","bits":4,"sym":true}}"#,
    r#"{"quantization_config":{"quant_method":"gptq","bits":8,"desc_act":true}}"#,
    r#"{"quantization_config":{"quant_method":"awq","bits":4}}"#,
    r#"{"quantization_config":{"quant_method":"mxfp4"}}"#,
    r#"{"quantization_config":{"quant_method":"fp8","weight_block_size":[1,32]},"expert_dtype":"fp4"}"#,
    r#"{"quantization_config":{"quant_method":"modelopt","quant_algo":"NVFP4"}}"#,
    r#"{"quantization_config":{"quant_method":"compressed-tensors","config_groups":{"g":{
    "format":"nvfp4-pack-quantized","weights":{"num_bits":4,"type":"float","group_size":16}}}}}"#,
    r#"{"quantization_config":{"quant_method":"mxfp8","weight_block_size":[1,32]}}"#,
];
const NAMES: [&str; 21] = [
    "a.experts.0.gate_proj.weight",
    "a.experts.0.gate_proj.weight_scale_inv",
    "a.experts.0.gate_proj.weight_scale",
    "a.experts.0.gate_proj.weight_packed",
    "a.experts.0.gate_proj.weight_scale_2",
    "a.experts.0.gate_proj.weight_global_scale",
    "a.experts.0.gate_proj.scale",
    "a.experts.0.gate_proj.weight_zero_point",
    "a.experts.0.gate_proj.weight_g_idx",
    "a.experts.0.gate_proj.weight_shape",
    "a.experts.0.gate_proj.qweight",
    "a.experts.0.gate_proj.qzeros",
    "a.experts.0.gate_proj.scales",
    "a.experts.0.gate_proj.g_idx",
    "a.experts.gate_up_proj",
    "a.experts.gate_up_proj_scale_inv",
    "a.experts.down_proj",
    "a.experts.gate_up_proj_blocks",
    "a.experts.gate_up_proj_scales",
    "a.experts.gate_up_proj_bias",
    "a.experts.gate_proj.weight",
];
const DTYPES: [(&str, usize); 8] =
    [("F32", 4), ("F16", 2), ("BF16", 2), ("F8_E4M3", 1), ("I32", 4), ("I8", 1), ("U8", 1), ("F8_E8M0", 1)];
const DIMS: [usize; 12] = [0, 1, 2, 4, 5, 8, 16, 32, 40, 64, 128, 256];

/// What a format would have under this name, so that more than the checks of shapes is reached.
fn plausible(name: &str, n: usize, k: usize) -> ((&'static str, usize), Vec<usize>) {
    let (dtype, shape) = match name.rsplit_once("proj").map_or("", |(_, end)| end) {
        ".weight" if name.contains(".0.") => (3, vec![n, k]),
        ".weight_scale_inv" => (0, vec![n.div_ceil(3), k.div_ceil(5)]),
        ".weight_scale" => (2, vec![n, k / 32]),
        ".weight_packed" => (4, vec![n, k / 8]),
        ".weight_zero_point" => (4, vec![n.div_ceil(8), k / 32]),
        ".weight_g_idx" | ".g_idx" => (4, vec![k]),
        ".weight_shape" => (4, vec![2]),
        ".qweight" => (4, vec![k / 8, n]),
        ".qzeros" => (4, vec![k / 32, n / 8]),
        ".scales" => (1, vec![k / 32, n]),
        "_scale_inv" => (0, vec![2, (2 * n).div_ceil(3), k.div_ceil(5)]),
        "_blocks" => (6, vec![2, 2 * n, k / 32, 16]),
        "_scales" => (6, vec![2, 2 * n, k / 32]),
        "_bias" => (2, vec![2, 2 * n]),
        ".weight" => (2, vec![2, n, k]),
        _ if name.ends_with("down_proj") => (2, vec![2, k, n]),
        _ => (2, vec![2, 2 * n, k]),
    };
    (DTYPES[dtype], shape)
}

/// Panics where a codec does.
pub(crate) fn check(bytes: &[u8]) {
    let mut bytes = bytes.iter().copied();
    let mut next = || bytes.next().unwrap_or(0) as usize;
    let (config, n, k) = (METHODS[next() % METHODS.len()], DIMS[next() % DIMS.len()], DIMS[next() % DIMS.len()]);
    let (mut header, mut data) = (Map::new(), Vec::new());
    for name in NAMES {
        let choice = next();
        let ((dtype, size), shape) = match choice {
            0..100 => continue,
            100..200 => plausible(name, n, k),
            _ => (DTYPES[choice % DTYPES.len()], (0..next() % 5).map(|_| DIMS[next() % DIMS.len()]).collect()),
        };
        let len = shape.iter().product::<usize>() * size;
        if len > 1 << 16 {
            return;
        }
        header.insert(
            name.into(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [data.len(), data.len() + len]}),
        );
        data.extend((0..len).map(|_| next() as u8));
    }
    let header = json!(header).to_string();
    let dir = tempfile::tempdir().expect("a temporary folder");
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(dir.path().join("model.safetensors"), file).expect("disk space");
    std::fs::write(dir.path().join("config.json"), config).expect("disk space");
    let Ok(checkpoint) = Checkpoint::open(dir.path()) else { return };
    let listed = checkpoint.matrices().into_iter().take(8);
    for (name, [n, k]) in
        listed.chain([("a.experts.0.gate_proj.weight".into(), [n, k]), ("a.experts.0.down_proj.weight".into(), [k, n])])
    {
        if n.saturating_mul(k) > 1 << 20 {
            continue;
        }
        let Ok(source) = checkpoint.source(&name, [n, k]) else { continue };
        let _ = source.decode(0, &mut vec![0.0; n * k]);
        for precision in source.kept_by().into_iter().chain([Precision::Bf16]) {
            let _ = rounding(&source, precision);
        }
    }
}

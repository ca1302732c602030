//! Safetensors folders: what is right opens, and every way to be wrong has a sentence.
#![allow(clippy::unwrap_used)] // a test

use std::path::Path;

use half::{bf16, f16};
use moebius_cache::checkpoint::parse_safetensors;
use moebius_cache::codec::decode_f32;
use moebius_cache::{Checkpoint, Dtype};
use proptest::prelude::*;
use tempfile::TempDir;

/// A file with this header, and `data_bytes` bytes of data.
fn file(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

const GOOD: &str = concat!(
    r#"{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"#,
    r#""b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}}"#
);

fn error(bytes: &[u8]) -> String {
    parse_safetensors(bytes).unwrap_err()
}

#[test]
fn a_matrix_is_there_in_whichever_format() {
    let dir = TempDir::new().unwrap();
    let entry = |name: &str, i: usize| {
        format!(r#""{name}":{{"dtype":"I32","shape":[2,2],"data_offsets":[{},{}]}}"#, 16 * i, 16 * (i + 1))
    };
    let names = ["a.weight", "b.weight_packed", "c.qweight", "d"];
    let entries: Vec<String> = names.iter().enumerate().map(|(i, name)| entry(name, i)).collect();
    std::fs::write(dir.path().join("model.safetensors"), file(&format!("{{{}}}", entries.join(",")), 64)).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let has = ["a.weight", "b.weight", "c.weight", "d", "e.weight", "a"].map(|name| checkpoint.has(name));
    assert_eq!(has, [true, true, true, true, false, false]);
}

#[test]
fn a_lying_header_is_refused() {
    let good = file(GOOD, 16);
    assert_eq!(parse_safetensors(&good).unwrap().len(), 2);
    assert_eq!(parse_safetensors(&good).unwrap()["b"].bytes, good.len() - 4..good.len());

    assert!(error(b"12345").contains("5 bytes, too few"));
    assert!(error(&good[..40]).contains("cut off"));
    assert!(error(&good[..good.len() - 1]).contains("cut off"), "a truncated shard");
    assert!(error(&file(GOOD, 17)).contains("cut off, or was written to"), "bytes that belong to nobody");
    for huge in [u64::MAX, u64::MAX - 7, 1 << 63, 100_000_001] {
        let mut bytes = good.clone();
        bytes[..8].copy_from_slice(&huge.to_le_bytes());
        assert!(error(&bytes).contains("more than 100 MB"), "{huge}");
    }
    let mut longer = good.clone();
    longer[..8].copy_from_slice(&1000u64.to_le_bytes());
    assert!(error(&longer).contains("longer than its"));

    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let cases = [
        (one("BF16", "[2,3]", "[0,10]"), 10, "do not fit its type and shape"),
        (one("BF16", "[2,3]", "[2,14]"), 14, "tensor a does not begin where"),
        (one("BF16", "[2,3]", "[12,0]"), 12, "tensor a does not begin where"),
        (one("BF16", "[2,3]", "[0,18446744073709551615]"), 12, "do not fit"),
        (one("F32", "[4294967296,4294967296]", "[0,4]"), 4, "impossible size"),
        (one("F32", "[4611686018427387905]", "[0,4]"), 4, "impossible size"),
        (one("BF17", "[2,3]", "[0,12]"), 12, "no valid safetensors header"),
        (one("BF16", "[-1]", "[0,2]"), 2, "no valid safetensors header"),
        ("{".into(), 0, "no valid safetensors header"),
        ("\u{0}".into(), 0, "no valid safetensors header"),
    ];
    for (header, data_bytes, expected) in cases {
        let error = error(&file(&header, data_bytes));
        assert!(error.contains(expected) && error.contains("download it again"), "{header}: {error}");
    }
    let overlapping = GOOD.replace("[12,16]", "[8,12]");
    assert!(error(&file(&overlapping, 12)).contains("tensor b does not begin where"));
    assert!(error(&file("\u{ff}", 0).iter().map(|b| b | 0x80).collect::<Vec<_>>()).contains("100 MB"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_damage_is_refused_or_harmless(at in 0usize..140, value: u8, cut in 0usize..160) {
        let mut bytes = file(GOOD, 16);
        let at = at % bytes.len();
        bytes[at] = value;
        bytes.truncate(bytes.len().saturating_sub(cut / 8));
        if let Ok(entries) = parse_safetensors(&bytes) {
            prop_assert!(entries.values().all(|entry| bytes.get(entry.bytes.clone()).is_some()));
        }
    }

    #[test]
    fn random_bytes_are_no_checkpoint(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_safetensors(&bytes);
    }
}

fn write(dir: &Path, name: &str, tensors: &[(&str, &str, &[usize], Vec<u8>)]) {
    let dtype = |name: &str| match name {
        "F32" => safetensors::Dtype::F32,
        "F16" => safetensors::Dtype::F16,
        "I64" => safetensors::Dtype::I64,
        _ => safetensors::Dtype::BF16,
    };
    let views = tensors.iter().map(|(name, kind, shape, bytes)| {
        (name, safetensors::tensor::TensorView::new(dtype(kind), shape.to_vec(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &dir.join(name)).unwrap();
}

fn tensor(name: &str) -> (&str, &'static str, &'static [usize], Vec<u8>) {
    (name, "BF16", &[2, 2], vec![0; 8])
}

fn index(dir: &Path, pairs: &[(&str, &str)]) {
    let map: serde_json::Map<String, serde_json::Value> =
        pairs.iter().map(|(t, f)| (t.to_string(), (*f).into())).collect();
    let text = serde_json::json!({ "metadata": {}, "weight_map": map }).to_string();
    std::fs::write(dir.join("model.safetensors.index.json"), text).unwrap();
}

fn open_error(dir: &TempDir) -> String {
    Checkpoint::open(dir.path()).unwrap_err().to_string()
}

#[test]
fn one_file_an_index_or_all_files() {
    let dir = TempDir::new().unwrap();
    assert!(open_error(&dir).contains("holds no *.safetensors"));
    write(dir.path(), "x.safetensors", &[tensor("x")]);
    write(dir.path(), "y.safetensors", &[tensor("y")]);
    assert_eq!(Checkpoint::open(dir.path()).unwrap().names().collect::<Vec<_>>(), ["x", "y"]);
    index(dir.path(), &[("y", "y.safetensors")]);
    assert_eq!(Checkpoint::open(dir.path()).unwrap().names().collect::<Vec<_>>(), ["y"]);
    std::fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    write(dir.path(), "model.safetensors", &[tensor("z")]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["z"]);
    let error = checkpoint.tensor("q").unwrap_err().to_string();
    assert!(error.contains("tensor q is missing") && error.contains(dir.path().to_str().unwrap()), "{error}");
    checkpoint.tensor("z").unwrap().expect_shape(&[2, 2]).unwrap();
    let error = checkpoint.tensor("z").unwrap().expect_shape(&[4]).unwrap_err().to_string();
    assert!(error.contains("tensor z has shape [2, 2] where [4] is expected"), "{error}");
}

#[test]
fn shards_and_index_must_agree() {
    let dir = TempDir::new().unwrap();
    index(dir.path(), &[("x", "x.safetensors"), ("y", "y.safetensors")]);
    write(dir.path(), "x.safetensors", &[tensor("x")]);
    assert!(open_error(&dir).contains("y.safetensors: this shard of 2 is missing"));
    write(dir.path(), "y.safetensors", &[tensor("other")]);
    assert!(open_error(&dir).contains("y.safetensors: tensor y is missing, although"));
    write(dir.path(), "y.safetensors", &[tensor("y"), tensor("x")]);
    assert!(open_error(&dir).contains("tensor x is also in"));
    index(dir.path(), &[("x", "../x.safetensors")]);
    assert!(open_error(&dir).contains("outside of its folder"));
    std::fs::write(dir.path().join("model.safetensors.index.json"), "[]").unwrap();
    assert!(open_error(&dir).contains("is not an index of shards"));
    std::fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    std::fs::write(dir.path().join("x.safetensors"), "").unwrap();
    assert!(open_error(&dir).contains("x.safetensors: is empty"));
    assert!(Checkpoint::open(&dir.path().join("none")).unwrap_err().to_string().contains("is no folder"));
}

#[test]
fn floats_decode_exactly_and_others_are_named() {
    let dir = TempDir::new().unwrap();
    let every: Vec<u16> = (0..=u16::MAX).collect();
    let finite = |is: fn(u16) -> bool| -> Vec<u16> { every.iter().copied().filter(|&bits| is(bits)).collect() };
    let halves = finite(|bits| f16::from_bits(bits).is_finite());
    let brains = finite(|bits| bf16::from_bits(bits).is_finite());
    let bytes = |bits: &[u16]| bits.iter().flat_map(|b| b.to_le_bytes()).collect::<Vec<u8>>();
    let tensors = [
        ("f16", "F16", &[halves.len()][..], bytes(&halves)),
        ("bf16", "BF16", &[brains.len()][..], bytes(&brains)),
        ("f32", "F32", &[3][..], [1.5f32, -0.0, 1e-40].iter().flat_map(|x| x.to_le_bytes()).collect()),
        ("i64", "I64", &[1][..], vec![0; 8]),
        ("inf", "F16", &[1][..], vec![0x00, 0x7c]),
        ("nan", "BF16", &[70][..], [vec![0; 138], vec![0xc0, 0xff]].concat()),
        ("beyond", "F32", &[1][..], f32::MAX.to_le_bytes().to_vec()),
    ];
    write(dir.path(), "model.safetensors", &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let decode = |name: &str| {
        let view = checkpoint.tensor(name).unwrap();
        let mut out = vec![9.0; view.shape.iter().product()];
        decode_f32(&view, &mut out).map(|()| out)
    };
    assert!(
        decode("f16").unwrap().iter().zip(&halves).all(|(x, &b)| x.to_bits() == f16::from_bits(b).to_f32().to_bits())
    );
    assert!(
        decode("bf16").unwrap().iter().zip(&brains).all(|(x, &b)| x.to_bits() == bf16::from_bits(b).to_f32().to_bits())
    );
    assert_eq!(decode("f32").unwrap(), [1.5, -0.0, 1e-40]);
    for (name, expected) in
        [("inf", "holds a NaN"), ("nan", "holds a NaN"), ("beyond", "beyond BF16"), ("i64", "is of type I64")]
    {
        let error = decode(name).unwrap_err().to_string();
        assert!(error.contains(&format!("tensor {name} ")) && error.contains(expected), "{error}");
    }
    assert_eq!(checkpoint.tensor("i64").unwrap().dtype, Dtype::I64);
    // Released pages come back with the same bytes.
    let view = checkpoint.tensor("bf16").unwrap();
    checkpoint.prefetch(&view);
    checkpoint.release(&view);
    assert_eq!(view.data, bytes(&brains));
}

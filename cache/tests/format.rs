//! Cache headers that lie: never a panic, never dimensions that are not those written.
#![allow(clippy::unwrap_used)] // a test

mod common;

use common::{INT4, SMALL};
use moebius_cache::format::{parse, reseal};
use moebius_cache::pack::{ExpertPrecision, Precisions};
use moebius_cache::{Contents, ExpertCache, ExpertLayout, Precision, ScaleType};
use proptest::prelude::*;
use tempfile::TempDir;

fn cache_bytes() -> Vec<u8> {
    let dir = TempDir::new().unwrap();
    SMALL.write(&dir.path().join("model"));
    let cache = SMALL.ensure(&dir.path().join("model"), &dir.path().join("cache")).0.unwrap();
    std::fs::read(cache.path()).unwrap()
}

#[test]
fn every_flipped_bit_of_the_header_is_seen() {
    let bytes = cache_bytes();
    let (header, _) = parse(&bytes).unwrap();
    let region = header.layers[0].offset as usize;
    let mut damaged = bytes.clone();
    for at in 0..region {
        for bit in 0..8 {
            damaged[at] ^= 1 << bit;
            assert!(parse(&damaged).is_err(), "bit {bit} of byte {at}");
            damaged[at] ^= 1 << bit;
        }
    }
    assert!(parse(&damaged).is_ok());
    for cut in [0, 1, 63, 64, 100, region - 1, region, bytes.len() - 1] {
        assert!(parse(&bytes[..cut]).is_err(), "{cut} bytes");
    }
}

#[test]
fn wrong_magic_version_and_length_are_told_apart() {
    let bytes = cache_bytes();
    let error = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        edit(&mut bytes);
        parse(&bytes).unwrap_err()
    };
    assert!(error(&|b| b[0] = b'X').contains("no Moebius cache, or one whose build was not finished"));
    assert!(error(&|b| b[8] = 9).contains("format version 9, and this program reads versions 2 to 4"));
    assert!(error(&|b| b.truncate(9000)).contains("cut off"));
    assert!(error(&|b| b[12..16].fill(0xff)).contains("a description of"));
    assert!(error(&|b| b[70] ^= 1).contains("damaged header"));
    assert!(error(&|b| b.truncate(3)).contains("3 bytes, too few"));
}

/// Older versions have the same layout, and fewer precisions.
#[test]
fn files_of_older_versions_are_read() {
    let mut bytes = cache_bytes();
    assert_eq!(bytes[8], 4);
    let (header, _) = parse(&bytes).unwrap();
    for version in [2, 3] {
        bytes[8] = version;
        reseal(&mut bytes);
        assert_eq!(parse(&bytes).unwrap().0, header);
    }
    bytes[8] = 1;
    reseal(&mut bytes);
    assert!(parse(&bytes).unwrap_err().contains("format version 1, and this program reads versions 2 to 4"));
}

/// Precisions are written as they always were, and the type of scales only where it is not bf16.
#[test]
fn precisions_have_names() {
    let f16 = ScaleType::F16;
    for (precision, json, name) in [
        (Precision::Bf16, r#"{"bits":"bf16"}"#, "bf16"),
        (Precision::int4(32), r#"{"bits":"int4","group_size":32}"#, "int4-g32"),
        (
            Precision::Int8 { group_size: 128, scales: f16 },
            r#"{"bits":"int8","group_size":128,"scales":"f16"}"#,
            "int8-g128-f16",
        ),
        (Precision::Mxfp4, r#"{"bits":"mxfp4"}"#, "mxfp4"),
        (Precision::fp8(128), r#"{"bits":"fp8","group_size":128}"#, "fp8-g128"),
        (
            Precision::fp8(32).with_scales(ScaleType::F32),
            r#"{"bits":"fp8","group_size":32,"scales":"f32"}"#,
            "fp8-g32-f32",
        ),
        (
            Precision::uint4(128).with_scales(f16),
            r#"{"bits":"uint4","group_size":128,"scales":"f16"}"#,
            "uint4-g128-f16",
        ),
        (Precision::iq4(128), r#"{"bits":"iq4","group_size":128}"#, "iq4-g128"),
        (Precision::Iq4Nl, r#"{"bits":"iq4_nl"}"#, "iq4_nl"),
        (Precision::Nvfp4, r#"{"bits":"nvfp4"}"#, "nvfp4"),
        (Precision::Iq3Xxs, r#"{"bits":"iq3_xxs"}"#, "iq3_xxs"),
        (Precision::Q4K, r#"{"bits":"q4_k"}"#, "q4_k"),
        (Precision::Q5_0, r#"{"bits":"q5_0"}"#, "q5_0"),
    ] {
        assert_eq!((serde_json::to_string(&precision).unwrap().as_str(), precision.to_string().as_str()), (json, name));
        assert_eq!(serde_json::from_str::<Precision>(json).unwrap(), precision);
        assert_eq!(serde_json::from_str::<Precisions>(json).unwrap(), precision.into());
    }
    let layer = |gate, down| ExpertPrecision { gate, down };
    let mixed: Precisions = [layer(Precision::Q4K, Precision::Q6K), Precision::Q4K.into()].into_iter().collect();
    let json = r#"[{"gate":{"bits":"q4_k"},"down":{"bits":"q6_k"}},{"gate":{"bits":"q4_k"},"down":{"bits":"q4_k"}}]"#;
    assert_eq!((serde_json::to_string(&mixed).unwrap().as_str(), mixed.to_string().as_str()), (json, "q4_k+q6_k"));
    assert_eq!(serde_json::from_str::<Precisions>(json).unwrap(), mixed);
    assert_eq!([Precision::Q6K.into(); 3].into_iter().collect::<Precisions>(), Precision::Q6K.into(), "all the same");
}

/// Layers of precisions of their own lie one after the other, each of its own size.
#[test]
fn layers_have_precisions_of_their_own() {
    let layer = |gate, down| ExpertPrecision { gate, down };
    let own = [layer(Precision::Q4K, Precision::Q6K), Precision::Q4K.into(), layer(Precision::Mxfp4, Precision::Q5_0)];
    let precision: Precisions = own.into_iter().collect();
    let contents = Contents {
        model: "mixed",
        hidden: 256,
        intermediate: 512,
        num_experts: 3,
        kind: Default::default(),
        precision,
        layers: &[1, 4, 5],
    };
    let cache =
        ExpertCache::anonymous(&contents, |layer, expert, bytes| bytes.fill((layer * 3 + expert) as u8)).unwrap();
    for (i, precision) in own.into_iter().enumerate() {
        let layout = ExpertLayout::new(256, 512, precision).unwrap();
        assert_eq!((cache.layout(i), cache.layer(i).len()), (layout, 3 * layout.bytes()));
        for expert in 0..3 {
            assert!(cache.expert(i, expert).iter().all(|&b| b == (i * 3 + expert) as u8));
        }
    }
    let too_few = Contents { layers: &[1, 4], ..contents.clone() };
    let error = ExpertCache::anonymous(&too_few, |_, _, _| ()).unwrap_err().to_string();
    assert!(error.contains("another number of layers"), "{error}");
    let narrow = Contents { intermediate: 384, ..contents };
    let error = ExpertCache::anonymous(&narrow, |_, _, _| ()).unwrap_err().to_string();
    assert!(error.contains("multiple of 256"), "{error}");
}

/// A header whose checksum is right although its description was changed is held to its word.
#[test]
fn impossible_dimensions_are_refused_behind_a_right_checksum() {
    let bytes = cache_bytes();
    let cases = [
        (r#""hidden":96"#, r#""hidden":32"#),
        (r#""hidden":96"#, r#""hidden":97"#),
        (r#""hidden":96"#, r#""hidden":00"#),
        (r#""num_experts":6"#, r#""num_experts":5"#),
        (r#""num_experts":6"#, r#""num_experts":0"#),
        (r#""num_layers":4"#, r#""num_layers":3"#),
        (r#""num_layers":4"#, r#""num_layers":9"#),
        (r#""group_size":32"#, r#""group_size":64"#),
        (r#""bits":"int4""#, r#""bits":"int8""#),
    ];
    for (from, to) in cases {
        let at = bytes
            .windows(from.len())
            .position(|window| window == from.as_bytes())
            .unwrap_or_else(|| panic!("no {from}"));
        let mut lying = bytes.clone();
        lying[at..at + to.len()].copy_from_slice(to.as_bytes());
        reseal(&mut lying);
        assert!(parse(&lying).is_err(), "{to}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_behind_the_magic_are_refused(tail in proptest::collection::vec(any::<u8>(), 0..9000),
        digits in 1usize..19) {
        let json = format!(r#"{{"model":"m","hidden":{0},"intermediate":{0},"num_experts":{0},"num_layers":{0},
                "precision":{{"bits":"bf16"}},"source":null}}"#, "9".repeat(digits));
        let mut bytes = b"MOEBIUS\0\x03\0\0\0".to_vec();
        bytes.extend((json.len() as u32).to_le_bytes());
        bytes.resize(64, 0);
        bytes.extend(json.as_bytes());
        bytes.extend(tail);
        reseal(&mut bytes);
        prop_assert!(parse(&bytes).is_err());
    }
}

#[test]
fn runs_of_layers_are_caches_of_their_own() {
    let dir = TempDir::new().unwrap();
    SMALL.write(&dir.path().join("model"));
    let whole = SMALL.ensure(&dir.path().join("model"), &dir.path().join("cache")).0.unwrap();
    let (path, layers) = (whole.path().to_path_buf(), whole.num_layers());
    assert!(layers > 1);
    // A damaged expert is told by the part that has it.
    let mut bytes = std::fs::read(&path).unwrap();
    let last = whole.header().layers[layers - 1].offset as usize;
    bytes[last] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let whole = ExpertCache::open(&path).unwrap();
    let parts = ExpertCache::open(&path).unwrap().split(&[0..1, 1..layers, layers..layers]);
    assert_eq!(parts.iter().map(ExpertCache::num_layers).collect::<Vec<_>>(), [1, layers - 1, 0]);
    assert_eq!(parts[1].run(), Some(&(1..layers)));
    for i in 0..layers {
        let (part, at) = if i == 0 { (&parts[0], 0) } else { (&parts[1], i - 1) };
        assert_eq!((part.layer(at), part.layout(at)), (whole.layer(i), whole.layout(i)));
        assert_eq!(part.record(at, 0), whole.record(i, 0));
        assert_eq!(part.check_expert(at, 0).is_err(), i + 1 == layers);
    }
    assert_eq!(whole.run(), None);
    let all = whole.split(std::slice::from_ref(&(0..layers)));
    assert_eq!(all[0].run(), None);
}

#[test]
fn random_experts_need_no_file() {
    let contents = Contents {
        model: "random",
        hidden: 64,
        intermediate: 96,
        num_experts: 3,
        kind: Default::default(),
        precision: INT4.into(),
        layers: &[1, 4],
    };
    let cache =
        ExpertCache::anonymous(&contents, |layer, expert, bytes| bytes.fill((layer * 3 + expert) as u8)).unwrap();
    for layer in 0..2 {
        for expert in 0..3 {
            assert!(cache.expert(layer, expert).iter().all(|&b| b == (layer * 3 + expert) as u8));
            cache.check_expert(layer, expert).unwrap();
        }
    }
    assert_eq!((cache.layer_index(4), cache.layer_index(2)), (Some(1), None));
    assert_eq!(cache.layer(1).len(), 3 * cache.layout(0).bytes());
    let too_large = Contents { hidden: 1 << 17, intermediate: 1 << 17, num_experts: 1 << 10, ..contents.clone() };
    let error = ExpertCache::anonymous(&too_large, |_, _, _| ()).unwrap_err().to_string();
    assert!(error.contains("do not fit into") && error.contains("use fewer layers"), "{error}");
    let uneven = Contents { precision: Precision::int8(128).into(), ..contents };
    assert!(ExpertCache::anonymous(&uneven, |_, _, _| ()).unwrap_err().to_string().contains("group size 128"));
}

#[test]
fn locking_works_or_names_the_limit() {
    let contents = Contents {
        model: "random",
        hidden: 64,
        intermediate: 64,
        num_experts: 2,
        kind: Default::default(),
        precision: INT4.into(),
        layers: &[0],
    };
    let cache = ExpertCache::anonymous(&contents, |_, _, _| ()).unwrap();
    if let Err(error) = cache.lock() {
        assert!(error.to_string().contains("ulimit -l"), "{error}");
    }
}

//! Ops on single rows: embedding, norms, rotation, SiLU, gates, gathering, steering.

use moebius::backend::{Addition, Attend, Dense, Load, Memory, Record, Rotary};
use moebius::model::{Activation, GateActivation};

use crate::common;
use common::gpu::{Filled, Sides, Within, both, check, host, need_gpu, ragged, random};

#[test]
fn embed_copies_rows() {
    need_gpu!();
    let sides = Sides::new();
    for cols in [8, 136, 2056] {
        let (batch, ..) = ragged(&[(1, 1), (70, 3), (200, 130)]);
        let table = random(50 * cols, 1);
        let (got, want) = both!(sides, |b| {
            let mut out = b.tensor_f32(batch.len(), cols).unwrap();
            b.embed(&b.load_embedding(host(cols, &table)).unwrap(), &b.on_device(&batch), cols, &mut out);
            b.numbers(&out)
        });
        assert_eq!(got, want, "{cols} columns");
    }
}

#[test]
fn rms_norm_of_both_kinds() {
    need_gpu!();
    let sides = Sides::new();
    for (rows, cols) in [(1, 8), (3, 136), (70, 1032), (2, 2056)] {
        let (x, w) = (random(rows * cols, 2), random(cols, 3));
        for eps in [1e-6, 0.3] {
            for narrow in [false, true] {
                let (got, want) = both!(sides, |b| {
                    let x = if narrow { b.filled(cols, &x) } else { b.filled_f32(cols, &x) };
                    let mut out = b.tensor(rows, cols).unwrap();
                    b.rms_norm(&x, &b.load_norm(w.clone().into()).unwrap(), eps, &mut out);
                    b.numbers(&out)
                });
                check(&format!("{rows} rows of {cols}, bf16 {narrow}"), &got, &want, Within::BF16);
            }
        }
    }
}

#[test]
fn rms_norm_of_heads_and_of_nothing_else() {
    need_gpu!();
    let sides = Sides::new();
    // Width of a head, columns of a row, and which of them are normed.
    for (width, cols, part) in [(8, 8, 0..8), (24, 240, 0..240), (64, 72, 8..72), (48, 64, 0..48), (128, 512, 128..384)]
    {
        for rows in [1, 37] {
            let (x, w) = (random(rows * cols, 4), random(width, 5));
            let (got, want) = both!(sides, |b| {
                let mut x = b.filled(cols, &x);
                b.rms_norm_heads(&mut x, &b.load_norm(w.clone().into()).unwrap(), 1e-6, part.clone());
                b.numbers(&x)
            });
            check(&format!("{rows} rows, heads of {width} in {part:?} of {cols}"), &got, &want, Within::BF16);
            let others = |i: usize| !part.contains(&(i % cols));
            assert!((0..x.len()).filter(|&i| others(i)).all(|i| got[i] == x[i]), "columns outside {part:?} changed");
        }
    }
}

#[test]
fn angles_up_to_far_positions() {
    need_gpu!();
    let sides = Sides::new();
    for half in [4, 32, 96] {
        let inv_freq: Vec<f32> = (0..half).map(|i| 10_000f32.powf(-(i as f32) / half as f32)).collect();
        let (mut batch, ..) = ragged(&[(1, 1), (65, 1), (300, 70)]);
        batch.positions[0] = 131_071;
        let factor = 1.416;
        let (got, want) = both!(sides, |b| {
            let mut out = b.tensor_f32(batch.len(), 2 * half).unwrap();
            b.rope_angles(&b.load_norm(inv_freq.clone().into()).unwrap(), factor, &b.on_device(&batch), &mut out);
            b.numbers(&out)
        });
        // The fast functions are right to 2^-21, and the reduced angle to an f32's 2^-23 of up to pi.
        let off = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
        assert!(off <= factor * 2f32.powi(-19), "{half} angles: off by {off}");
    }
}

#[test]
fn rope_turns_pairs_and_leaves_the_rest() {
    need_gpu!();
    let sides = Sides::new();
    // Heads, their width, where the rotated part begins and how wide it is: whole, the first part, the last part, one
    // in the middle.
    for (heads, dim, at, turned) in [(4, 64, 0, 64), (3, 48, 0, 16), (5, 72, 40, 32), (1, 128, 8, 96), (2, 8, 0, 8)] {
        for interleaved in [false, true] {
            for rows in [1, 66] {
                let (x, angles) = (random(rows * heads * dim, 6), random(rows * turned, 7));
                let (got, want) = both!(sides, |b| {
                    let mut x = b.filled(heads * dim, &x);
                    let angles = b.filled_f32(turned, &angles);
                    b.rope(&mut x, dim, at, &Rotary { angles: &angles, interleaved });
                    b.numbers(&x)
                });
                let what =
                    format!("{rows} rows, {heads} heads of {dim}, {turned} from {at}, interleaved {interleaved}");
                check(&what, &got, &want, Within::BF16);
                let part = at..at + turned;
                assert!(
                    (0..x.len()).filter(|i| !part.contains(&(i % dim))).all(|i| got[i] == x[i]),
                    "{what}: the rest changed"
                );
            }
        }
    }
}

#[test]
fn activations_of_any_size() {
    need_gpu!();
    let sides = Sides::new();
    let activations = [
        Activation::Silu,
        Activation::GeluTanh,
        Activation::ClampedSilu { limit: 0.7 },
        Activation::ClampedSwiglu { limit: 1.5, alpha: 1.702 },
    ];
    for ((rows, cols), activation) in
        [(1, 8), (3, 72), (130, 136)].into_iter().flat_map(|size| activations.map(|activation| (size, activation)))
    {
        // From -8 to 8: both ends of the sigmoid.
        let gate: Vec<f32> = random(rows * cols, 8).iter().map(|g| 8.0 * g).collect();
        let up = random(rows * cols, 9);
        let (got, want) = both!(sides, |b| {
            let mut out = b.tensor(rows, cols).unwrap();
            b.activate(activation, &b.filled(cols, &gate), &b.filled(cols, &up), &mut out);
            b.numbers(&out)
        });
        check(&format!("{rows} rows of {cols}, {activation:?}"), &got, &want, Within::BF16);
    }
}

#[test]
fn streams_are_scaled_normed_and_bounded() {
    need_gpu!();
    let sides = Sides::new();
    for (rows, cols) in [(1, 8), (3, 72), (40, 2312)] {
        let [x, y, w] = [(rows * cols, 81), (rows * cols, 82), (cols, 83)].map(|(n, seed)| random(n, seed));
        let x: Vec<f32> = x.iter().map(|x| 8.0 * x + 1.0).collect();
        let (got, want) = both!(sides, |b| {
            let w = b.load_norm(w.clone().into()).unwrap();
            let [mut scaled, mut capped, mut cleared, mut added] = [0; 4].map(|_| b.filled_f32(cols, &x));
            let mut half = b.filled(cols, &y);
            b.scale(&mut scaled, 0.37);
            b.scale(&mut half, 0.37);
            b.softcap(&mut capped, 3.0);
            b.clear(&mut cleared);
            b.norm_add(&b.filled_f32(cols, &y), (&w, 1e-6), 0.6, &mut added);
            let mut normed = b.tensor(rows, cols).unwrap();
            b.layer_norm(&b.filled_f32(cols, &x), &w, 1e-5, &mut normed);
            let parts = [&scaled, &capped, &cleared, &added, &half, &normed];
            parts.map(|t| b.numbers(t)).concat()
        });
        check(&format!("{rows} rows of {cols}"), &got, &want, Within::BF16);
    }
}

#[test]
fn gather_picks_rows_of_a_part() {
    need_gpu!();
    let sides = Sides::new();
    let (cols, first) = (136, 100);
    let x = random(40 * cols, 10);
    let (got, want) = both!(sides, |b| {
        let mut out = b.filled_f32(cols, &vec![9.0; 8 * cols]);
        let x = b.filled_f32(cols, &x);
        b.gather(&x, &[100, 139], first, &mut out, 0);
        b.gather(&x, &[101, 117, 138], first, &mut out, 2);
        b.gather(&x, &[120], first, &mut out, 6);
        b.numbers(&out)
    });
    assert_eq!(got, want);
}

#[test]
fn additions_go_to_their_rows_after_their_layer() {
    need_gpu!();
    let sides = Sides::new();
    for (rows, cols, first) in [(1, 8, 0), (37, 136, 0), (5, 2056, 7)] {
        let (x, vectors) = (random(rows * cols, 11), [random(cols, 12), random(cols, 13)]);
        // The rows are those from `first` on of the batch; of some additions a part lies elsewhere.
        let some = [
            (2, first..first + rows, 0, -3.7),
            (0, first..first + 1, 1, 0.3),
            (2, first + rows / 2..first + rows + 9, 1, 1.1),
            (2, 0..first + rows.div_ceil(2), 0, 5e3),
            (3, 0..first, 0, 2.0),
        ];
        // More than there is room for at first, and few again.
        for repeats in [1, 40, 1] {
            let list: Vec<_> = (0..repeats).flat_map(|_| some.clone()).collect();
            let (got, want) =
                both!(sides, |b| {
                    let held = vectors.clone().map(|vector| std::sync::Arc::new(b.load_norm(vector.into()).unwrap()));
                    let addition =
                        |&(layer, ref rows, vector, coefficient): &(usize, std::ops::Range<usize>, usize, f32)| {
                            Addition { layer, rows: rows.clone(), vector: held[vector].clone(), coefficient }
                        };
                    let mut additions = b.additions(4).unwrap();
                    b.set_additions(&mut additions, vec![]).unwrap();
                    b.set_additions(&mut additions, list.iter().map(addition).collect()).unwrap();
                    let after = |layer| {
                        let mut x = b.filled_f32(cols, &x);
                        b.add_vectors(&additions, layer, first, &mut x);
                        b.numbers(&x)
                    };
                    [after(0), after(1), after(2), after(3)]
                });
            for (layer, got) in got.iter().enumerate() {
                assert_eq!(got, &want[layer], "layer {layer}, rows from {first} on, {rows} of {cols} columns");
                let mut plain = x.clone();
                for (_, rows, vector, coefficient) in list.iter().filter(|(of, ..)| *of == layer) {
                    let here = plain.iter_mut().enumerate().filter(|(i, _)| rows.contains(&(first + i / cols)));
                    here.for_each(|(i, x)| *x += coefficient * vectors[*vector][i % cols]);
                }
                assert_eq!(got, &plain, "layer {layer}");
            }
        }
        let (got, want) = both!(sides, |b| {
            let mut out = vec![0.0; rows.div_ceil(2) * cols];
            b.read_rows(&b.filled_f32(cols, &x), rows / 2..rows, &mut out).unwrap();
            out
        });
        assert!(got == want && got == x[rows / 2 * cols..]);
    }
}

#[test]
fn shortlists_have_the_largest_and_weigh_all() {
    need_gpu!();
    let sides = Sides::new();
    // Rounded to bf16, so there are equals; up to three launches.
    for (rows, cols) in [(1, 64), (3, 1000), (2, 1024), (5, 5003), (2, 151_936)] {
        let mut logits: Vec<f32> = random(rows * cols, 40).iter().map(|x| 20.0 * x).collect();
        (logits[7], logits[11]) = (f32::NAN, f32::NEG_INFINITY);
        let inverse: Vec<f32> = (0..rows).map(|row| 0.5 + row as f32).collect();
        let mut lists = Vec::new();
        let mut s = sides.gpu.shortlister(rows, cols).unwrap();
        sides.gpu.shortlist(&mut s, &sides.gpu.filled_f32(cols, &logits), &inverse, &mut lists).unwrap();
        assert_eq!(lists.len(), rows);
        for (row, list) in lists.iter().enumerate() {
            let logits = &logits[row * cols..(row + 1) * cols];
            let mut want: Vec<(u32, f32)> = logits
                .iter()
                .enumerate()
                .map(|(i, &l)| (i as u32, if l.is_nan() { f32::NEG_INFINITY } else { l }))
                .collect();
            want.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            let weight = |l: f32| (f64::from(l - want[0].1) * f64::from(inverse[row])).exp();
            let total: f64 = want.iter().map(|&(_, l)| weight(l)).sum();
            want.truncate(64);
            assert_eq!(list.best, want, "row {row} of {rows} rows of {cols}");
            assert!(
                (list.total / total - 1.0).abs() < 1e-5,
                "row {row} of {rows} rows of {cols}: {} and {total}",
                list.total
            );
        }
    }
}

#[test]
fn gates_of_numbers_and_of_rows() {
    need_gpu!();
    let sides = Sides::new();
    for (rows, hidden, cols) in [(1, 8, 16), (3, 136, 72), (40, 2056, 1032)] {
        let [x, gate, w, h] =
            [(rows * cols, 61), (rows * cols, 62), (hidden, 63), (rows * hidden, 64)].map(|(n, seed)| random(n, seed));
        let (got, want) = both!(sides, |b| {
            let mut x = b.filled(cols, &x);
            b.gate(&b.filled(cols, &gate), GateActivation::Sigmoid, &mut x);
            b.numbers(&x)
        });
        check(&format!("{rows} rows of {cols}, each number"), &got, &want, Within::BF16);
        for activation in [GateActivation::Sigmoid, GateActivation::Softplus] {
            let (got, want) = both!(sides, |b| {
                let mut x = b.filled(cols, &x);
                b.gate(&b.filled(cols / 8, &gate[..rows * cols / 8]), activation, &mut x);
                b.numbers(&x)
            });
            check(&format!("{rows} rows of {cols}, heads, {activation:?}"), &got, &want, Within::BF16);
        }
        let (got, want) = both!(sides, |b| {
            let mut x = b.filled(cols, &x);
            b.gate_rows(&b.load_norm(w.clone().into()).unwrap(), &b.filled(hidden, &h), &mut x);
            b.numbers(&x)
        });
        check(&format!("{rows} rows of {cols}, of {hidden}"), &got, &want, Within::BF16);
    }
}

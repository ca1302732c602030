//! The largest logits of each row, so that a token is chosen without whole rows crossing to the host.

use std::sync::Arc;

use super::{CudaBackend, Tensor};
use crate::Result;
use crate::backend::tensor::Shortlist;
use crate::cuda::{Address, Cuda, DeviceBuffer, PinnedBuffer, launch};

/// Numbers that a block of the kernel sorts, and how many of them it keeps.
const PART: usize = 1024;
const KEPT: usize = 64;

/// What a launch leaves for the next, and the last one for the host.
pub struct Shortlister {
    best: [DeviceBuffer<f32>; 2],
    ids: [DeviceBuffer<i32>; 2],
    sums: DeviceBuffer<f32>,                 // [rows, blocks, 2]
    inverse_temperatures: DeviceBuffer<f32>, // [rows]
    host_best: PinnedBuffer<f32>,            // [rows, KEPT]
    host_ids: PinnedBuffer<i32>,             // [rows, KEPT]
    host_sums: PinnedBuffer<f32>,
}

impl Shortlister {
    pub(super) fn new(cuda: &Arc<Cuda>, max_rows: usize, cols: usize) -> Result<Self> {
        let blocks = max_rows * cols.div_ceil(PART);
        let kept = || DeviceBuffer::new(cuda, blocks * KEPT);
        let ids = || DeviceBuffer::new(cuda, blocks * KEPT);
        Ok(Self {
            best: [kept()?, kept()?],
            ids: [ids()?, ids()?],
            sums: DeviceBuffer::new(cuda, 2 * blocks)?,
            inverse_temperatures: DeviceBuffer::new(cuda, max_rows)?,
            host_best: PinnedBuffer::new(cuda, max_rows * KEPT)?,
            host_ids: PinnedBuffer::new(cuda, max_rows * KEPT)?,
            host_sums: PinnedBuffer::new(cuda, 2 * blocks)?,
        })
    }
}

impl CudaBackend {
    pub(super) fn shortlist_rows(
        &self,
        s: &mut Shortlister,
        logits: &Tensor,
        inverse_temperatures: &[f32],
        out: &mut Vec<Shortlist>,
    ) -> Result<()> {
        let (cuda, rows, blocks) = (&self.cuda, logits.rows, logits.cols.div_ceil(PART));
        assert_eq!(inverse_temperatures.len(), rows);
        cuda.upload(&cuda.compute, s.inverse_temperatures.address(), inverse_temperatures);
        let (mut values, mut ids, mut n, mut sums) = (logits.f32(), Address::NULL, logits.cols, s.sums.address());
        for level in 0.. {
            let (best, best_ids) = (s.best[level % 2].address(), s.ids[level % 2].address());
            launch!(cuda, &cuda.compute, "shortlist", [n.div_ceil(PART), rows, 1], 512, 0;
                values, ids, best, best_ids, s.inverse_temperatures.address(), sums, n as i32, n as i32);
            (values, ids, sums, n) = (best, best_ids, Address::NULL, n.div_ceil(PART) * KEPT);
            if n == KEPT {
                break;
            }
        }
        cuda.download(&cuda.compute, values, &mut s.host_best[..rows * KEPT]);
        cuda.download(&cuda.compute, ids, &mut s.host_ids[..rows * KEPT]);
        cuda.download(&cuda.compute, s.sums.address(), &mut s.host_sums[..rows * blocks * 2]);
        cuda.synchronize()?;

        out.resize_with(rows, Shortlist::default);
        for (row, list) in out.iter_mut().enumerate() {
            let at = row * KEPT..(row + 1) * KEPT;
            let best = s.host_ids[at.clone()].iter().zip(&s.host_best[at]);
            list.best.clear();
            list.best.extend(best.take(logits.cols).map(|(&id, &logit)| (id as u32, logit)));
            let largest = f64::from(list.best[0].1);
            let part = |part: &[f32]| {
                f64::from(part[1]) * ((f64::from(part[0]) - largest) * f64::from(inverse_temperatures[row])).exp()
            };
            list.total = s.host_sums[row * blocks * 2..(row + 1) * blocks * 2].chunks(2).map(part).sum();
        }
        Ok(())
    }
}

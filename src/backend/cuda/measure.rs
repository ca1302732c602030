//! The rate of a large product, measured.

use half::bf16;

use super::CudaBackend;
use super::product::{Out, Product};
use crate::Result;
use crate::cuda::{Address, DeviceBuffer};
use crate::kernel::random::Random;

impl CudaBackend {
    /// Operations a second of a product of `wide` tokens, outputs and inputs.
    pub(super) fn large_product(&self, wide: usize) -> Result<f64> {
        let cuda = &self.cuda;
        // Zeros would be multiplied at a clock that no model sees.
        let mut random = Random(7);
        let some: Vec<bf16> = (0..wide * 64).map(|_| bf16::from_f32(random.uniform() as f32 - 0.5)).collect();
        let numbers = || {
            let buffer = DeviceBuffer::<bf16>::new(cuda, wide * wide)?;
            (0..wide * wide)
                .step_by(some.len())
                .for_each(|at| cuda.upload(&cuda.compute, buffer.address().add(at), &some));
            Ok::<_, crate::Error>(buffer)
        };
        let (x, w, y) = (numbers()?, numbers()?, numbers()?);
        let product = Product {
            x: x.address(),
            x_pitch: wide,
            x_batch: 0,
            w: w.address(),
            w_batch: 0,
            bias: Address::NULL,
            y: y.address().cast(),
            y_pitch: wide,
            y_batch: 0,
            tokens: wide,
            n: wide,
            k: wide,
            batch: 1,
            out: Out::Bf16,
        };
        Ok(2.0 * (wide as f64).powi(3) / cuda.fastest(|| self.product(&product))?)
    }
}

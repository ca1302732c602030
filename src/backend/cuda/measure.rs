//! What the device can do, measured: the limits that a bench is held against.

use half::bf16;

use super::CudaBackend;
use super::linear::{Out, Product};
use crate::Result;
use crate::backend::Rates;
use crate::cuda::{Address, DeviceBuffer};
use crate::kernel::random::Random;

/// Bytes that are copied.
const COPY_BYTES: usize = 256 << 20;

/// Rows, columns and depth of the product.
const WIDE: usize = 8192;

impl CudaBackend {
    /// Best of some runs of a copy within the device's memory, a copy to it, and a large product.
    pub(super) fn measure(&self) -> Result<Rates> {
        let cuda = &self.cuda;
        let taken = cuda.allocated();
        // An emulated device takes minutes for what a real one does in a millisecond.
        let (bytes, wide) = if cuda.info.is_emulated() { (1 << 20, 64) } else { (COPY_BYTES, WIDE) };
        let (memory, link) = (cuda.vram_bandwidth(2 * bytes)?, cuda.pcie_bandwidth(bytes)?);
        Ok(Rates { device: cuda.info.name.clone(), memory, link, products: self.large_product(wide)?, taken })
    }

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

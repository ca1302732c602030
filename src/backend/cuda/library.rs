//! Dense products of many tokens by cuBLASLt, on devices on which it is clearly faster than our own kernels.

use super::product::{MANY_TOKENS, Out, Product};
use super::{CudaBackend, RECORDED_TOKENS};
use crate::Result;
use crate::cuda::cublas_lt::{CublasLt, MatmulShape};

/// How much faster the library must be: a choice that noise could turn would give other bits at the next start.
const CLEARLY: f64 = 1.1;

/// Rows, columns and depth of the product that decides.
const DECIDES: usize = 4096;

// Recorded passes do without the library.
const _: () = assert!(RECORDED_TOKENS < MANY_TOKENS);

/// Operations a second of a large product of BF16 matrices, two to a weight and a token.
#[derive(Debug)]
pub struct ProductRates {
    /// By our own kernels.
    pub own: f64,
    /// By cuBLASLt, with its name. An error: it is not there.
    pub library: Result<(String, f64)>,
    /// Whether it multiplies.
    pub library_used: bool,
}

impl CudaBackend {
    /// Takes the library where it is there and measured to be faster. On Hopper, where our kernels come to 98% of it,
    /// loading it would cost more than it brings.
    pub(super) fn choose_library(&mut self) -> Result<()> {
        let cuda = &self.cuda;
        if cuda.is_plan() || cuda.info.is_emulated() || cuda.info.has_wgmma() {
            return Ok(());
        }
        let rates = self.product_rates(DECIDES)?;
        self.library =
            rates.library.ok().filter(|(_, rate)| *rate > CLEARLY * rates.own).map(|_| CublasLt::open()).transpose()?;
        Ok(())
    }

    /// Multiplies with the library from now on, whether it is faster or not. Errors: `Error::Device` where there is
    /// none.
    pub fn use_library(&mut self) -> Result<()> {
        self.library = Some(CublasLt::open()?);
        Ok(())
    }

    /// Multiplies with what another rank does: what all compute must have the same bits.
    pub fn multiply_like(&mut self, other: &Self) -> Result<()> {
        self.library = other.library.as_ref().map(|_| CublasLt::open()).transpose()?;
        Ok(())
    }

    /// What multiplies instead of our own kernels.
    pub fn library(&self) -> Option<String> {
        self.library.as_ref().map(CublasLt::name)
    }

    /// Measures both ways on a product of `wide` tokens, outputs and inputs.
    pub fn product_rates(&mut self, wide: usize) -> Result<ProductRates> {
        let used = self.library.take();
        let own = self.large_product(wide)?;
        let library = match self.use_library() {
            Ok(()) => Ok((self.library().unwrap_or_default(), self.large_product(wide)?)),
            Err(error) => Err(error),
        };
        self.library = used;
        Ok(ProductRates { own, library, library_used: self.library.is_some() })
    }

    /// Whether the library has taken a product. It takes none with a bias, which is f32 here whatever the outputs are.
    pub(super) fn by_library(&self, p: &Product) -> bool {
        let Some(library) = self.library.as_ref().filter(|_| p.bias.is_null()) else { return false };
        let &Product { tokens, n, k, x_pitch, y_pitch, batch, x_batch, w_batch, y_batch, .. } = p;
        let shape =
            MatmulShape { tokens, n, k, x_pitch, y_pitch, batch, x_batch, w_batch, y_batch, wide: p.out != Out::Bf16 };
        library.multiply(&self.cuda, &self.workspace.partial, &shape, p.x, p.w, p.y, p.out == Out::F32Add)
    }
}

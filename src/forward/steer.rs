//! Steering: vectors of requests on the device, and what a pass adds to the residual stream.

use std::sync::Arc;

use super::buffers::Part;
use super::tap::Tap;
use crate::backend::{Addition, Backend};
use crate::model::ModelConfig;
use crate::{Error, Result};

/// Bytes of steering vectors on the device, of all requests together.
const MAX_VECTOR_BYTES: usize = 32 << 20;

/// Vectors on the device, and the additions of a pass.
pub(super) struct Steering<B: Backend> {
    widths: [usize; 2], // of a stream, and of all
    vectors: Vec<DeviceVector<B::Norm>>,
    additions: B::Additions,
    active: bool, // in this pass
}

/// A vector of requests, `[hidden]` or `[streams * hidden]`.
struct DeviceVector<N> {
    given: Arc<[f32]>,
    on_device: Arc<N>,
}

impl<B: Backend> Steering<B> {
    pub(super) fn new(backend: &B, model: &ModelConfig) -> Result<Self> {
        let additions = backend.additions(model.all_layers())?;
        let widths = [model.hidden_size, model.streams().width()];
        Ok(Self { widths, vectors: Vec::new(), additions, active: false })
    }

    /// As [`Forward::hold`](super::Forward::hold), on one of so many devices that hold the same.
    pub(super) fn hold(
        &mut self,
        backend: &B,
        vectors: &mut dyn Iterator<Item = &Arc<[f32]>>,
        devices: usize,
    ) -> Result<()> {
        let before = self.vectors.len();
        self.vectors.retain(|held| Arc::strong_count(&held.given) > devices);
        if self.vectors.len() < before {
            backend.set_additions(&mut self.additions, Vec::new())?; // it holds them too
        }
        let mut numbers: usize = self.vectors.iter().map(|held| held.given.len()).sum();
        for vector in vectors {
            assert!(self.widths.contains(&vector.len()), "a vector of the residual stream");
            if self.vectors.iter().any(|held| Arc::ptr_eq(&held.given, vector)) {
                continue;
            }
            numbers += vector.len();
            if numbers * size_of::<f32>() > MAX_VECTOR_BYTES {
                return Err(Error::Busy(format!(
                    "the steering vectors of all requests take more than {} MiB: try again in a while, or use fewer",
                    MAX_VECTOR_BYTES >> 20
                )));
            }
            let on_device = Arc::new(backend.load_norm(vector.to_vec().into())?);
            self.vectors.push(DeviceVector { given: vector.clone(), on_device });
        }
        Ok(())
    }

    /// Brings the additions of the coming pass to the device.
    pub(super) fn prepare(&mut self, backend: &B, tap: Option<&Tap>) -> Result<()> {
        let wanted = tap.map_or(&[][..], |tap| &tap.additions);
        self.active = !wanted.is_empty();
        if !self.active {
            return Ok(());
        }
        let on_device = |Addition { layer, rows, vector, coefficient }: &Addition<[f32]>| {
            let held = self.vectors.iter().find(|held| Arc::ptr_eq(&held.given, vector));
            Addition {
                layer: *layer,
                rows: rows.clone(),
                vector: held.expect("vectors are held before they are added").on_device.clone(),
                coefficient: *coefficient,
            }
        };
        backend.set_additions(&mut self.additions, wanted.iter().map(on_device).collect())
    }

    /// Adds what the pass adds to `part` after `layer`.
    pub(super) fn add(&self, backend: &B, layer: usize, part: &mut Part<B>) {
        if self.active {
            backend.add_vectors(&self.additions, layer, part.rows.start, &mut part.x);
        }
    }
}

//! What a pass adds to the residual stream, on the device: where a recorded pass finds it.

use std::sync::Arc;

use crate::Result;
use crate::backend::Addition;
use crate::cuda::{Address, Cuda, DeviceBuffer};

/// Words of an addition: `Addition` in kernels/rows.cu.
const WORDS: usize = 6;
/// There is room for so many from the start.
const ROOM: usize = 64;

/// The additions after each layer, layer after layer.
pub struct Additions {
    data: DeviceBuffer<u32>, /* where those of each layer begin, and the end of all, [layers + 1], padded; then
                              * they, [room, WORDS] */
    layers: usize,
    room: usize,
    vectors: Vec<Arc<DeviceBuffer<f32>>>, // that they point to
}

impl Additions {
    pub(super) fn new(cuda: &Arc<Cuda>, layers: usize) -> Result<Self> {
        let data = DeviceBuffer::zeros(cuda, begins(layers) + ROOM * WORDS)?;
        Ok(Self { data, layers, room: ROOM, vectors: Vec::new() })
    }

    /// Whether a list of so many is at another address than those before.
    pub(super) fn grow(&mut self, cuda: &Arc<Cuda>, additions: usize) -> Result<bool> {
        if additions <= self.room {
            return Ok(false);
        }
        let room = additions.next_power_of_two();
        self.data = DeviceBuffer::zeros(cuda, begins(self.layers) + room * WORDS)?;
        self.room = room;
        Ok(true)
    }

    /// There must be room for them.
    pub(super) fn set(&mut self, cuda: &Cuda, mut additions: Vec<Addition<DeviceBuffer<f32>>>) {
        additions.sort_by_key(|addition| addition.layer); // stable: of a layer they stay in order
        let mut words: Vec<u32> =
            (0..=self.layers).map(|layer| additions.partition_point(|a| a.layer < layer) as u32).collect();
        words.resize(begins(self.layers), 0);
        for Addition { rows, vector, coefficient, .. } in &additions {
            let address = vector.address().to_u64();
            words.extend([
                address as u32,
                (address >> 32) as u32,
                coefficient.to_bits(),
                rows.start as u32,
                rows.end as u32,
                0,
            ]);
        }
        cuda.upload(&cuda.compute, self.data.address(), &words);
        self.vectors = additions.into_iter().map(|addition| addition.vector).collect();
    }

    /// Two numbers: where those after `layer` begin and end.
    pub(super) fn of_layer(&self, layer: usize) -> Address<u32> {
        self.data.address().add(layer)
    }

    pub(super) fn entries(&self) -> Address<u32> {
        self.data.address().add(begins(self.layers))
    }
}

/// Words before the first addition, which begins with an address.
fn begins(layers: usize) -> usize {
    (layers + 1).next_multiple_of(2)
}

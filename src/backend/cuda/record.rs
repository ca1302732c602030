//! Recorded passes as CUDA graphs; what a pass adds to the residual stream, where a recorded one finds it; times.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use super::{CudaBackend, RECORDED_TOKENS, Tensor};
use crate::Result;
use crate::backend::batch::Batch;
use crate::backend::{Addition, DecodeShape, Hooks, OpTime, Rates, Record};
use crate::cuda::{Address, Cuda, DeviceBuffer, Graph, kernels, launch};

/// Bytes that are copied to measure the device.
const COPY_BYTES: usize = 256 << 20;

/// Rows, columns and depth of the product that measures it.
const WIDE: usize = 8192;

/// Decode steps that have run, by their shape.
pub(super) type Graphs = RefCell<HashMap<DecodeShape, Recorded>>;

/// Where a shape of decode steps is on its way to being recorded.
pub(super) enum Recorded {
    /// It has run once op by op, which allocated and loaded whatever it needs.
    Warm,
    Graph(Graph),
}

/// Words of an addition.
const WORDS: usize = size_of::<kernels::Addition>() / 4;
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
    /// Whether a list of so many is at another address than those before.
    fn grow(&mut self, cuda: &Arc<Cuda>, additions: usize) -> Result<bool> {
        if additions <= self.room {
            return Ok(false);
        }
        let room = additions.next_power_of_two();
        self.data = DeviceBuffer::zeros(cuda, begins(self.layers) + room * WORDS)?;
        self.room = room;
        Ok(true)
    }

    /// There must be room for them.
    fn set(&mut self, cuda: &Cuda, mut additions: Vec<Addition<DeviceBuffer<f32>>>) {
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
                vector.len() as u32,
            ]);
        }
        cuda.upload(&cuda.compute, self.data.address(), &words);
        self.vectors = additions.into_iter().map(|addition| addition.vector).collect();
    }

    /// Two numbers: where those after `layer` begin and end.
    fn of_layer(&self, layer: usize) -> Address<u32> {
        self.data.address().add(layer)
    }

    fn entries(&self) -> Address<kernels::Addition> {
        self.data.address().add(begins(self.layers)).cast()
    }
}

/// Words before the first addition, which begins with an address.
fn begins(layers: usize) -> usize {
    (layers + 1).next_multiple_of(2)
}

impl Record for CudaBackend {
    type Additions = Additions;

    fn replay(&self, batch: &Batch, hooks: Hooks, record: &mut dyn FnMut() -> Result<()>) -> Result<bool> {
        let Some(shape) = DecodeShape::of(batch, hooks).filter(|shape| shape.sequences <= RECORDED_TOKENS) else {
            return record().map(|()| false);
        };
        let mut graphs = self.graphs.borrow_mut();
        match graphs.get(&shape) {
            None => {
                self.cuda.rehearse(record)?;
                graphs.insert(shape, Recorded::Warm);
                return Ok(false);
            }
            // With a mark in front of each kernel a recording of a deep model may be so long that its launch does not
            // return before the first kernels have ended, and these wait for another device's.
            Some(Recorded::Warm) if self.rank.is_some() && self.cuda.is_profiling() => {
                self.cuda.rehearse(record)?;
                return Ok(false);
            }
            Some(Recorded::Warm) => {
                let graph = Graph::record(&self.cuda, record)?;
                graphs.insert(shape, Recorded::Graph(graph));
            }
            Some(Recorded::Graph(_)) => {}
        }
        if let Some(Recorded::Graph(graph)) = graphs.get(&shape) {
            graph.launch();
        }
        Ok(true)
    }

    fn is_recorded(&self, batch: &Batch, hooks: Hooks) -> bool {
        let shape = DecodeShape::of(batch, hooks);
        shape.is_some_and(|shape| matches!(self.graphs.borrow().get(&shape), Some(Recorded::Graph(_))))
    }

    fn additions(&self, layers: usize) -> Result<Additions> {
        let data = DeviceBuffer::zeros(&self.cuda, begins(layers) + ROOM * WORDS)?;
        Ok(Additions { data, layers, room: ROOM, vectors: Vec::new() })
    }

    fn set_additions(&self, to: &mut Additions, additions: Vec<Addition<DeviceBuffer<f32>>>) -> Result<()> {
        if to.grow(&self.cuda, additions.len())? {
            self.graphs.borrow_mut().retain(|shape, _| !shape.steered); // they have the old address
        }
        to.set(&self.cuda, additions);
        Ok(())
    }

    fn add_vectors(&self, additions: &Additions, layer: usize, first: usize, x: &mut Tensor) {
        launch!(self.cuda, &self.cuda.compute, kernels::add_vectors, [x.rows, 1, 1];
            additions.of_layer(layer), additions.entries(), first as i32, x.f32(), x.cols as i32);
    }

    /// Best of some runs of a copy within the device's memory, a copy to it, and a large product.
    fn rates(&self) -> Result<Option<Rates>> {
        let cuda = &self.cuda;
        let taken = cuda.allocated();
        // An emulated device takes minutes for what a real one does in a millisecond.
        let (bytes, wide) = if cuda.info.is_emulated() { (1 << 20, 64) } else { (COPY_BYTES, WIDE) };
        let (memory, link) = (cuda.vram_bandwidth(2 * bytes)?, cuda.pcie_bandwidth(bytes)?);
        Ok(Some(Rates { device: cuda.info.name.clone(), memory, link, products: self.large_product(wide)?, taken }))
    }

    fn profiling(&self, on: bool) -> Result<()> {
        self.graphs.borrow_mut().clear();
        self.cuda.profiling(on)
    }

    fn take_profile(&self) -> Result<Vec<OpTime>> {
        let times = self.cuda.take_profile()?;
        Ok(times.into_iter().map(|(name, launches, seconds)| OpTime { name, launches, seconds }).collect())
    }

    fn enter_thread(&self) -> Result<()> {
        self.cuda.enter_thread()
    }
}

//! The epilogue of an expert's products on the device (kernels/epilogue.cuh).

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::cuda::{Address, Cuda, DeviceBuffer, kernels};
use crate::experts::Epilogue;
use crate::experts::epilogue::RowBias;
use crate::model::{Activation, Share};

/// Biases and activation of all layers.
pub(super) struct DeviceEpilogue {
    activations: Vec<Activation>, // by MoE layer
    biases: Vec<Biases>,          // by MoE layer; empty: there are none
}

/// The biases of a layer, `[experts, rows]`.
struct Biases {
    gate: DeviceBuffer<f32>,
    up: DeviceBuffer<f32>,
    down: Option<DeviceBuffer<f32>>, // of the first rank: it is added once
}

impl DeviceEpilogue {
    /// Copies the biases of `layers` layers to the device, of a rank's run of the experts' width.
    pub(super) fn new(
        cuda: &Arc<Cuda>,
        host: &Epilogue,
        layers: usize,
        (share, width): (Share, &Range<usize>),
    ) -> Result<Self> {
        let upload = |[gate, up, down]: [&RowBias; 3]| {
            let upload = |bias: &RowBias, rows: Range<usize>| match cuda.is_plan() {
                true => DeviceBuffer::new(cuda, bias.experts() * rows.len()),
                false => DeviceBuffer::from_slice(cuda, &bias.of_rows(rows)),
            };
            Ok(Biases {
                gate: upload(gate, width.clone())?,
                up: upload(up, width.clone())?,
                down: if share.rank == 0 { Some(upload(down, 0..down.rows)?) } else { None },
            })
        };
        let biases = (0..layers).map_while(|layer| host.biases(layer)).map(upload).collect::<Result<_>>()?;
        Ok(Self { activations: (0..layers).map(|layer| host.activation(layer)).collect(), biases })
    }

    /// A MoE layer's, as kernels take it.
    pub(super) fn of(&self, layer: usize) -> kernels::Epilogue {
        let address = |bias: &DeviceBuffer<f32>| bias.address();
        let [gate, up, down] = self.biases.get(layer).map_or([Address::NULL; 3], |Biases { gate, up, down }| {
            [address(gate), address(up), down.as_ref().map_or(Address::NULL, address)]
        });
        kernels::Epilogue { gate, up, down, activation: self.activations[layer].into() }
    }
}

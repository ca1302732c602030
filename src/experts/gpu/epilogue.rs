//! The epilogue of an expert's products on the device (kernels/epilogue.cuh).

use std::sync::Arc;

use crate::Result;
use crate::cuda::{Address, Cuda, DeviceBuffer, kernels};
use crate::experts::Epilogue;
use crate::experts::epilogue::RowBias;
use crate::model::Activation;

/// Biases and activation of all layers.
pub(super) struct DeviceEpilogue {
    activations: Vec<Activation>,        // by MoE layer
    biases: Vec<[DeviceBuffer<f32>; 3]>, // by MoE layer: of gate, up and down, [experts, rows]; empty: there are none
}

impl DeviceEpilogue {
    /// Copies the biases of `layers` layers to the device.
    pub(super) fn new(cuda: &Arc<Cuda>, host: &Epilogue, layers: usize) -> Result<Self> {
        let upload = |[gate, up, down]: [&RowBias; 3]| {
            let upload = |bias: &RowBias| match cuda.is_plan() {
                true => DeviceBuffer::new(cuda, bias.len),
                false => DeviceBuffer::from_slice(cuda, &bias.values),
            };
            Ok([upload(gate)?, upload(up)?, upload(down)?])
        };
        let biases = (0..layers).map_while(|layer| host.biases(layer)).map(upload).collect::<Result<_>>()?;
        Ok(Self { activations: (0..layers).map(|layer| host.activation(layer)).collect(), biases })
    }

    /// A MoE layer's, as kernels take it.
    pub(super) fn of(&self, layer: usize) -> kernels::Epilogue {
        let [gate, up, down] =
            self.biases.get(layer).map_or([Address::NULL; 3], |biases| biases.each_ref().map(DeviceBuffer::address));
        kernels::Epilogue { gate, up, down, activation: self.activations[layer].into() }
    }
}

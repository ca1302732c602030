//! A GPU to test on: a real one, or kernels/emulator where there is none.

use std::path::Path;
use std::sync::OnceLock;

use moebius::config::{Device, EngineConfig};

/// What tests run on; `None`, said once, where there is neither a GPU nor the emulator.
pub fn device() -> Option<&'static str> {
    static DEVICE: OnceLock<Option<&'static str>> = OnceLock::new();
    *DEVICE.get_or_init(|| {
        // SAFETY: the driver's own initializers run; the library stays.
        #[allow(unsafe_code)]
        let open = |path: &Path| unsafe { libloading::Library::new(path).map(std::mem::forget).is_ok() };
        if open(Path::new("libcuda.so.1")) {
            return Some("a GPU");
        }
        let emulator = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/emulator/libcuda.so.1");
        if open(&emulator) {
            return Some("the emulator");
        }
        eprintln!("skipped: there is no GPU, and no emulator (`make emulator`)");
        None
    })
}

/// On the GPU.
pub fn on_gpu(config: EngineConfig) -> EngineConfig {
    EngineConfig { device: Device::Cuda(0), ..config }
}

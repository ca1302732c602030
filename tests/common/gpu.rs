//! A GPU to test on: a real one, or kernels/emulator where there is none.

use std::io::Write as _;
use std::path::Path;
use std::sync::OnceLock;

use moebius::config::{Device, EngineConfig};

/// What tests run on; `None`, and the test's name said, where there is neither a GPU nor the emulator.
pub fn device() -> Option<&'static str> {
    static DEVICE: OnceLock<Option<&'static str>> = OnceLock::new();
    let device = *DEVICE.get_or_init(|| {
        // SAFETY: the driver's own initializers run; the library stays.
        #[allow(unsafe_code)]
        let open = |path: &Path| unsafe { libloading::Library::new(path).map(std::mem::forget).is_ok() };
        if open(Path::new("libcuda.so.1")) {
            return Some("a GPU");
        }
        let emulator = super::root().join("target/emulator/libcuda.so.1");
        open(&emulator).then_some("the emulator")
    });
    if device.is_none() {
        // Not `eprintln!`: what a test that passes has printed is not shown.
        let test = std::thread::current().name().unwrap_or("a test").to_owned();
        let line = format!("{test}: skipped: there is neither a GPU nor the emulator (`make emulator`)\n");
        std::io::stderr().write_all(line.as_bytes()).unwrap();
    }
    device
}

/// On the GPU.
pub fn on_gpu(config: EngineConfig) -> EngineConfig {
    EngineConfig { device: Device::Cuda(0), ..config }
}

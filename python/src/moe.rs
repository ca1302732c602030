//! The routed experts of one layer for other engines, behind `moebius.MoE`.
//!
//! All layers of a process share one store per model and one team.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use moebius::config::{Device, EngineConfig, ExpertBits, ExpertsMemory};
use moebius::experts::gpu::held::HeldSizes;
use moebius::experts::gpu::prompts::PromptSizes;
use moebius::experts::service::{DeviceTokens, Tokens};
use moebius::experts::stream_port::{StreamPort, Ticket};
use moebius::experts::{ExpertService, RowType, ServedLayer};
use moebius::hub;
use moebius::load::experts::{ExpertArrays, is_cache_file, open_experts, pack_experts};
use moebius::load::{self, LoadProgress, Machine};
use moebius::machine::topology::Topology;
use moebius::model::Share;
use moebius_cache::pack::unpack_expert;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::dlpack::{DlDevice, Kind, View};
use crate::error::exception;

type Key = (String, String, Option<usize>, Option<PathBuf>);

static STORES: Mutex<BTreeMap<Key, Weak<ExpertService>>> = Mutex::new(BTreeMap::new());
static PORTS: Mutex<BTreeMap<i32, Arc<StreamPort>>> = Mutex::new(BTreeMap::new());
static MACHINE: OnceLock<Machine> = OnceLock::new();

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The workers. The first caller decides their number.
fn machine(config: &EngineConfig) -> moebius::Result<&'static Machine> {
    static STARTING: Mutex<()> = Mutex::new(());
    let _one = lock(&STARTING);
    if let Some(machine) = MACHINE.get() {
        return Ok(machine);
    }
    let topology = Topology::read();
    let threads = config.threads.map(|n| n.clamp(1, topology.default_threads()));
    let machine = load::machine(&EngineConfig { threads, ..config.clone() }, &topology)?;
    Ok(MACHINE.get_or_init(|| machine))
}

/// Reports the progress of long work, at most every tenth of it.
fn report(to: &Option<Py<PyAny>>) -> impl Fn(LoadProgress<'_>) + Sync {
    let said = AtomicUsize::new(usize::MAX);
    let to = to.as_ref().map(|to| Python::attach(|py| to.clone_ref(py)));
    move |progress| {
        let (text, part) = match progress {
            LoadProgress::Convert(p) if p.bytes_total > 0 => {
                let percent = 100 * p.bytes_done / p.bytes_total;
                (format!("{}: {percent}%", p.phase), percent as usize / 10)
            }
            LoadProgress::Convert(p) => (p.phase.to_string(), 100),
            LoadProgress::Weights(done, layers) | LoadProgress::Copy(done, layers) => {
                (format!("experts: layer {done} of {layers}"), 200 + 10 * done / layers.max(1))
            }
            LoadProgress::Experts(text) => (text.to_string(), 300),
        };
        if let (Some(to), true) = (&to, said.swap(part, Ordering::Relaxed) != part) {
            // A failed report is ignored: it is only progress.
            Python::attach(|py| drop(to.call1(py, (text,))));
        }
    }
}

/// The experts of `model`, opened once in this process.
fn store(model: &str, config: &EngineConfig, on_progress: &Option<Py<PyAny>>) -> moebius::Result<Arc<ExpertService>> {
    let key = (model.to_string(), format!("{:?}", config.experts), config.group_size, config.cache_dir.clone());
    let mut stores = lock(&STORES);
    if let Some(store) = stores.get(&key).and_then(Weak::upgrade) {
        return Ok(store);
    }
    let machine = machine(config)?;
    let path = Path::new(model);
    let dir = if is_cache_file(path) { path.to_path_buf() } else { hub::resolve(model, &load::cache_dir(config)?)? };
    let store = Arc::new(open_experts(model, &dir, config, machine, &report(on_progress))?);
    stores.insert(key, Arc::downgrade(&store));
    Ok(store)
}

/// A batch between submit and sync.
struct UnderWay {
    stream: usize,
    shape: [usize; 2],
    rows: RowType,
    ticket: Option<(i32, Ticket)>, // and its device; None: of no tokens
}

/// One layer's routed experts. `moebius.MoE` is the class that people use.
#[pyclass(frozen, module = "moebius._moebius")]
pub(crate) struct ExpertLayer {
    layer: Arc<ServedLayer>,
    index: usize,
    known: Mutex<HashMap<i32, usize>>, // its number at the port of each device
    under_way: Mutex<Vec<UnderWay>>,
}

impl ExpertLayer {
    fn cache(&self) -> &moebius_cache::ExpertCache {
        self.layer.service().memory().cache()
    }

    /// Shape and type of a batch. Errors: it does not fit the layer.
    fn batch(&self, x: &View, ids: &View, weights: &View) -> PyResult<([usize; 2], RowType, usize)> {
        let hidden = self.cache().header().hidden;
        let &[tokens, cols] = &x.shape[..] else { return Err(x.wrong_shape(&format!("[tokens, {hidden}]"))) };
        if cols != hidden {
            return Err(x.wrong_shape(&format!("[tokens, {hidden}]")));
        }
        let Kind::Float(rows) = x.kind else { return Err(x.wrong_type("float32, float16 or bfloat16")) };
        let &[n, top_k] = &ids.shape[..] else { return Err(ids.wrong_shape("[tokens, top_k]")) };
        if n != tokens || top_k > 1024 {
            return Err(ids.wrong_shape(&format!("[{tokens}, top_k], top_k at most 1024")));
        }
        if !matches!(ids.kind, Kind::Int(_)) {
            return Err(ids.wrong_type("int32 or int64"));
        }
        if weights.shape != ids.shape {
            return Err(weights.wrong_shape(&format!("[{tokens}, {top_k}], as topk_ids")));
        }
        if weights.kind != Kind::Float(RowType::F32) {
            return Err(weights.wrong_type("float32"));
        }
        if ids.device != x.device || weights.device != x.device {
            return Err(PyTypeError::new_err(
                "x, topk_ids and topk_weights are on different devices: move them to one",
            ));
        }
        Ok(([tokens, hidden], rows, top_k))
    }
}

#[pymethods]
impl ExpertLayer {
    /// A layer of `model` (a folder, GGUF file, Hugging Face id or cache file) or of `weights` (three arrays).
    #[new]
    #[pyo3(signature = (model, layer, *, weights=None, precision=None, group_size=None, cache_dir=None, threads=None,
        rank=0, ranks=1, report=None))]
    #[allow(clippy::too_many_arguments)] // keywords
    fn new(
        py: Python<'_>,
        model: Option<String>,
        layer: usize,
        weights: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>, Bound<'_, PyAny>)>,
        precision: Option<&str>,
        group_size: Option<usize>,
        cache_dir: Option<PathBuf>,
        threads: Option<usize>,
        rank: usize,
        ranks: usize,
        report: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        if rank >= ranks {
            return Err(PyValueError::new_err(format!("rank {rank} of {ranks}: expected 0 to {}", ranks.max(1) - 1)));
        }
        let unknown = |why: String| PyValueError::new_err(format!("precision {why}"));
        let config = EngineConfig {
            experts: precision.map_or(Ok(ExpertBits::Auto), str::parse).map_err(unknown)?,
            group_size,
            cache_dir,
            // Other ranks' processors compute nothing.
            threads: if rank == 0 { threads } else { Some(1) },
            // A copy would be one in each process.
            experts_memory: if ranks == 1 { ExpertsMemory::default() } else { ExpertsMemory::Map },
            device: Device::Cpu,
            ..Default::default()
        };
        let service = match (model, weights) {
            (Some(model), None) => py.detach(|| store(&model, &config, &report)).map_err(exception)?,
            (None, Some((gate, up, down))) => {
                let views = [View::of(&gate, "gate")?, View::of(&up, "up")?, View::of(&down, "down")?];
                if let Some(view) = views.iter().find(|view| view.device != DlDevice::Cpu) {
                    return Err(view.wrong_type("a CPU array"));
                }
                let &[experts, intermediate, hidden] = &views[0].shape[..] else {
                    return Err(views[0].wrong_shape("[experts, intermediate, hidden]"));
                };
                if views[1].shape != views[0].shape {
                    return Err(views[1].wrong_shape(&format!("[{experts}, {intermediate}, {hidden}], as gate")));
                }
                if views[2].shape != [experts, hidden, intermediate] {
                    return Err(views[2].wrong_shape(&format!("[{experts}, {hidden}, {intermediate}]")));
                }
                let [gate, up, down] = [views[0].floats()?, views[1].floats()?, views[2].floats()?];
                let arrays = ExpertArrays { shape: [experts, intermediate, hidden], gate: &gate, up: &up, down: &down };
                Arc::new(
                    py.detach(|| machine(&config).and_then(|machine| pack_experts(arrays, &config, machine)))
                        .map_err(exception)?,
                )
            }
            _ => return Err(PyTypeError::new_err("give a model or weights=(gate, up, down), and not both")),
        };
        let cache = service.memory().cache();
        let index = cache.layer_index(layer).ok_or_else(|| {
            let layers: Vec<usize> = cache.header().layers.iter().map(|entry| entry.layer).collect();
            PyValueError::new_err(format!(
                "layer {layer} has no routed experts: {} layers have some, {:?} to {:?}",
                layers.len(),
                layers.first(),
                layers.last()
            ))
        })?;
        let layer = Arc::new(ServedLayer::new(service.clone(), index, Share { rank, of: ranks }));
        Ok(Self { layer, index, known: Mutex::default(), under_way: Mutex::default() })
    }

    /// Width of the residual stream.
    #[getter]
    fn hidden_size(&self) -> usize {
        self.cache().header().hidden
    }

    /// Width of an expert.
    #[getter]
    fn intermediate_size(&self) -> usize {
        self.cache().header().intermediate
    }

    /// Experts of the layer.
    #[getter]
    fn num_experts(&self) -> usize {
        self.cache().num_experts()
    }

    /// Its index among the layers with experts, and the number of these layers.
    #[getter]
    fn place(&self) -> (usize, usize) {
        (self.index, self.cache().num_layers())
    }

    /// Storage of the weights.
    #[getter]
    fn precision(&self) -> String {
        self.cache().header().precision.to_string()
    }

    /// Whether the width of an expert can be divided by the ranks.
    #[getter]
    fn is_divided(&self) -> bool {
        self.layer.device_share().is_some_and(|share| !share.is_whole())
    }

    /// Number of workers.
    #[getter]
    fn threads(&self) -> usize {
        self.layer.service().team().threads()
    }

    /// Reads the layer and verifies its checksums. `logical` maps ids to experts.
    fn load(&self, py: Python<'_>, logical: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        if let Some(logical) = logical {
            let view = View::of(logical, "physical_to_logical_map")?;
            if view.device != DlDevice::Cpu || view.shape.len() != 1 {
                return Err(view.wrong_shape("one row of ids, on the CPU"));
            }
            self.layer.set_logical(view.ids()?).map_err(exception)?;
        }
        py.detach(|| self.layer.load()).map_err(exception)
    }

    /// Lets a CUDA device compute batches of at least `from_tokens` tokens, `tokens` of them at once.
    fn compute_prompts(
        &self,
        py: Python<'_>,
        device: i32,
        from_tokens: usize,
        tokens: usize,
        top_k: usize,
        ring_bytes: usize,
    ) -> PyResult<()> {
        let (service, sizes) = (self.layer.service(), PromptSizes { from_tokens, tokens, top_k, ring_bytes });
        py.detach(|| port(device, service)?.compute_prompts(&self.layer, sizes)).map_err(exception)
    }

    /// Lets a CUDA device hold experts of the model in `pool_bytes` of its memory, for batches of up to `tokens`
    /// tokens. `pool`: the first rank's, for another.
    #[pyo3(signature = (device, pool_bytes, tokens, top_k, pool=None))]
    fn hold_experts(
        &self,
        py: Python<'_>,
        device: i32,
        pool_bytes: u64,
        tokens: usize,
        top_k: usize,
        pool: Option<PathBuf>,
    ) -> PyResult<()> {
        let (service, sizes) = (self.layer.service(), HeldSizes { pool_bytes, tokens, top_k });
        py.detach(|| port(device, service)?.hold_experts(&self.layer, sizes, pool.as_deref())).map_err(exception)
    }

    /// What the first rank's others are given to hold the same experts; `None`: there are none.
    fn pool(&self, py: Python<'_>, device: i32) -> PyResult<Option<PathBuf>> {
        py.detach(|| port(device, self.layer.service()).map(|port| port.pool(&self.layer))).map_err(exception)
    }

    /// Experts of each layer that a device holds, choices of such experts and of others; `None`: it holds none.
    fn held(&self, py: Python<'_>, device: i32) -> PyResult<Option<(usize, u64, u64)>> {
        let held = py.detach(|| port(device, self.layer.service()).map(|port| port.held(&self.layer)));
        Ok(held.map_err(exception)?.map(|(experts, choices)| (experts, choices.hits, choices.misses)))
    }

    /// Skips ids whose flag is set. Every call reads the flags.
    fn set_mask(&self, mask: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(mask) = mask else {
            self.layer.set_skip(None);
            return Ok(());
        };
        let view = View::of(mask, "gpu_experts_mask")?;
        if view.kind != Kind::Bool || view.device != DlDevice::Cpu {
            return Err(view.wrong_type("bool, on the CPU"));
        }
        if view.shape.len() != 1 {
            return Err(view.wrong_shape("one flag for each expert"));
        }
        self.layer.set_skip(Some(Box::new(move |id| view.flag(id))));
        Ok(())
    }

    /// `out[t] = sum over a token's experts of weight * expert(x_t)`, on the CPU.
    fn forward(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        topk_ids: &Bound<'_, PyAny>,
        topk_weights: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (x, ids, weights) =
            (View::of(x, "x")?, View::of(topk_ids, "topk_ids")?, View::of(topk_weights, "topk_weights")?);
        let (shape, rows, top_k) = self.batch(&x, &ids, &weights)?;
        let mut out = View::of(out, "out")?;
        if x.device != DlDevice::Cpu || out.device != DlDevice::Cpu {
            return Err(PyTypeError::new_err(
                "forward is for CPU arrays: use submit_forward and sync_forward for CUDA",
            ));
        }
        if out.shape != shape || out.kind != x.kind {
            return Err(out.wrong_shape(&format!("{shape:?} of x's type")));
        }
        let (ids, weights) = (ids.ids()?, weights.floats()?);
        let batch = Tokens { x: x.as_bytes(), rows, ids: &ids, weights: &weights, top_k };
        let out = out.as_bytes_mut()?;
        py.detach(|| self.layer.forward(batch, out)).map_err(exception)
    }

    /// Enqueues a batch of CUDA arrays on a stream.
    fn submit(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        topk_ids: &Bound<'_, PyAny>,
        topk_weights: &Bound<'_, PyAny>,
        stream: usize,
    ) -> PyResult<()> {
        let (x, ids, weights) =
            (View::of(x, "x")?, View::of(topk_ids, "topk_ids")?, View::of(topk_weights, "topk_weights")?);
        let (shape, rows, top_k) = self.batch(&x, &ids, &weights)?;
        let DlDevice::Cuda(device) = x.device else { return Err(PyTypeError::new_err("x is on the CPU: use forward")) };
        if !x.address().is_multiple_of(16) || !(shape[1] * rows.bytes()).is_multiple_of(16) {
            return Err(PyValueError::new_err("rows of x are not aligned to 16 bytes: give x.clone()"));
        }
        let Kind::Int(id_bytes) = ids.kind else { return Err(ids.wrong_type("int32 or int64")) };
        let batch = DeviceTokens {
            x: x.address(),
            rows,
            ids: ids.address(),
            id_bytes,
            weights: weights.address(),
            tokens: shape[0],
            top_k,
        };
        let ticket = match shape[0] {
            0 => None,
            _ => Some(py.detach(|| self.submit_device(device, &batch, stream)).map_err(exception)?),
        };
        lock(&self.under_way).push(UnderWay { stream, shape, rows, ticket: ticket.map(|ticket| (device, ticket)) });
        Ok(())
    }

    /// Enqueues on the same stream the copy of the oldest batch's sum to `out`.
    fn sync(&self, py: Python<'_>, out: &Bound<'_, PyAny>, stream: usize) -> PyResult<()> {
        let out = View::of(out, "out")?;
        let mut under_way = lock(&self.under_way);
        let Some(at) = under_way.iter().position(|batch| batch.stream == stream) else {
            return Err(PyRuntimeError::new_err(
                "nothing was submitted on this stream: call submit_forward before sync_forward",
            ));
        };
        let UnderWay { shape, rows, ticket, .. } = &under_way[at];
        if out.shape != shape
            || out.kind != Kind::Float(*rows)
            || ticket.as_ref().is_some_and(|(device, _)| out.device != DlDevice::Cuda(*device))
        {
            return Err(out.wrong_shape(&format!("{shape:?}, of the type and on the device of what was submitted")));
        }
        if !out.address().is_multiple_of(16) {
            return Err(PyValueError::new_err("out is not aligned to 16 bytes: give another array"));
        }
        let Some((device, ticket)) = under_way.remove(at).ticket else { return Ok(()) };
        drop(under_way);
        let address = out.address();
        py.detach(|| port(device, self.layer.service())?.sync(ticket, address)).map_err(exception)
    }

    /// Gate, up and down of an expert with the values used in the computation, f32.
    #[allow(clippy::type_complexity)] // three arrays
    fn expert_weights<'py>(
        &self,
        py: Python<'py>,
        expert: usize,
    ) -> PyResult<(Bound<'py, PyArray2<f32>>, Bound<'py, PyArray2<f32>>, Bound<'py, PyArray2<f32>>)> {
        let experts = self.cache().num_experts();
        if expert >= experts {
            return Err(PyValueError::new_err(format!("expert {expert} of {experts}: expected 0 to {}", experts - 1)));
        }
        let (memory, layout) = (self.layer.service().memory(), self.cache().layout(self.index));
        let mut bytes = vec![0; layout.bytes()];
        memory.each_run(self.index, expert..expert + 1, |at, run| bytes[at..at + run.len()].copy_from_slice(run));
        let [gate, up, down] = unpack_expert(&layout, &bytes);
        let array = |values: Vec<f32>, n: usize, k: usize| PyArray1::from_vec(py, values).reshape([n, k]);
        let (hidden, intermediate) = (layout.gate.k, layout.gate.n);
        Ok((array(gate, intermediate, hidden)?, array(up, intermediate, hidden)?, array(down, hidden, intermediate)?))
    }
}

impl ExpertLayer {
    fn submit_device(&self, device: i32, batch: &DeviceTokens, stream: usize) -> moebius::Result<Ticket> {
        let port = port(device, self.layer.service())?;
        let layer = *lock(&self.known).entry(device).or_insert_with(|| port.add_layer(self.layer.clone()));
        port.submit(layer, batch, stream)
    }
}

/// The state of a device for experts, opened at its first use.
fn port(device: i32, service: &ExpertService) -> moebius::Result<Arc<StreamPort>> {
    let mut ports = lock(&PORTS);
    if let Some(port) = ports.get(&device) {
        return Ok(port.clone());
    }
    let port = Arc::new(StreamPort::open(device as usize, service.team())?);
    ports.insert(device, port.clone());
    Ok(port)
}

//! Packing for a text: what the experts read of it, layer by layer, from a forward pass that has nothing but the
//! checkpoint.
//!
//! ```text
//! reader      embeds all of the text; each layer in turn: attention, router ─▶ waits for the layer's experts
//! converter   packs a layer's experts in BF16 ─▶ the reader computes them, and gives back what they read
//!             moments of each expert's inputs ─▶ its codes, while the reader goes on with attention
//! ```
//!
//! The text is one pass of sequences of `WINDOW` tokens, so each layer's experts are read once, and one layer of them
//! is in memory.

use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use moebius_cache::checkpoint::Checkpoint;
use moebius_cache::codec::Source;
use moebius_cache::convert::{ExpertMoments, Inputs, Job, OfExpert, packed};
use moebius_cache::format::{Contents, ExpertCache};
use moebius_cache::pack::Precision;
use moebius_cache::quantize::{Moments, Products};

use super::cache::cache_job;
use super::folder::ModelFolder;
use super::machine::{Machine, RESERVE_BYTES, gib};
use crate::backend::Routing;
use crate::backend::batch::{BLOCK_SIZE, Batch};
use crate::backend::cpu::Cpu;
use crate::backend::source::{Shapes, TensorSource};
use crate::backend::tensor::Tensor;
use crate::config::{DenseBits, KvBits};
use crate::experts::{CpuExperts, Epilogue, ExpertExecutor, ExpertMemory, Traffic};
use crate::forward::kv_cache::{CacheSize, KvCache};
use crate::forward::weights::Weights;
use crate::forward::{Limits, Model};
use crate::machine::heap::Heap;
use crate::model::ModelConfig;
use crate::{Error, Result};

/// Tokens of a sequence.
const WINDOW: usize = 512;
/// Tokens of a text that are read at most.
pub const MOST_TOKENS: usize = 1 << 17;
/// Tokens that an expert should see on average at least.
const LEAST_ROWS: usize = 64;
/// Tokens for each input that say what a whole layer reads.
const LAYER_ROWS: usize = 8;
/// Tokens that the experts of a layer compute at a time.
const PART_TOKENS: usize = 1024;

/// A text that a model's experts are packed for.
pub struct CalibrationText<'a> {
    folder: &'a ModelFolder,
    machine: &'a Machine,
    tokens: Vec<u32>,
}

impl std::fmt::Debug for CalibrationText<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tokens", self.tokens.len())
    }
}

impl<'a> CalibrationText<'a> {
    /// Of the first [`MOST_TOKENS`] tokens. Errors: they are too few, or the pass does not fit into memory.
    pub fn new(folder: &'a ModelFolder, machine: &'a Machine, mut tokens: Vec<u32>) -> Result<Self> {
        let moe = folder.model.moe().expect("a model whose experts are packed has experts");
        let least = (LEAST_ROWS * moe.num_experts).div_ceil(moe.router.top_k);
        if tokens.len() < least {
            return Err(Error::Invalid(format!(
                "--calibrate: the text has {} tokens, too few for {} experts: give {least} at least, better \
                 {MOST_TOKENS}",
                tokens.len(),
                moe.num_experts
            )));
        }
        tokens.truncate(MOST_TOKENS);
        let text = Self { folder, machine, tokens };
        let heap = Heap::plan();
        text.model(&heap, &Shapes::default(), None)?;
        // Of a layer the experts, what they read, and a copy of that for the converter.
        let model = &folder.model;
        let width = moe.expert_width(model.hidden_size);
        let layer = moe.expert_kind().layout(width, moe.intermediate_size, Precision::Bf16)?.bytes();
        let rows = 2 * width + moe.router.top_k * moe.intermediate_size;
        let own = moe.num_experts * layer + size_of::<f32>() * rows * text.tokens.len();
        let (needed, free) = (heap.bytes() + own as u64, machine.available_bytes.saturating_sub(RESERVE_BYTES));
        match needed > free {
            true => Err(Error::Resources(format!(
                "--calibrate: a text of {} tokens needs {:.1} GiB of memory and {:.1} are free: give a shorter one",
                text.tokens.len(),
                gib(needed),
                gib(free)
            ))),
            false => Ok(text),
        }
    }

    /// The model as it reads the text.
    fn model(
        &self,
        heap: &Heap,
        source: &dyn TensorSource,
        experts: Option<Box<dyn ExpertExecutor<Cpu>>>,
    ) -> Result<Model<Cpu>> {
        let (model, tokens) = (&self.folder.model, self.tokens.len());
        let Machine { team, kernel, .. } = self.machine;
        let limits = Limits { tokens, chunk_tokens: tokens, logit_rows: 1 };
        let backend = Cpu::new(team.clone(), *kernel).with(heap, limits.max_rows());
        let weights = Weights::load(&backend, source, model, DenseBits::Bf16, &|_, _| Ok(()))?;
        let sequences = tokens.div_ceil(WINDOW);
        let size = CacheSize { blocks: sequences * WINDOW / BLOCK_SIZE, slots: sequences, ..CacheSize::default() };
        let kv = KvCache::new(&backend, model, size, KvBits::Bf16)?;
        Model::new(backend, model.clone(), weights, experts, kv, limits)
    }

    /// One pass of all sequences.
    fn batch(&self) -> Batch {
        let mut batch = Batch::default();
        for (i, tokens) in self.tokens.chunks(WINDOW).enumerate() {
            let first = i * WINDOW / BLOCK_SIZE;
            let blocks: Vec<u32> = (first..first + WINDOW / BLOCK_SIZE).map(|block| block as u32).collect();
            batch.push(tokens, 0, &blocks).slot = i;
        }
        batch
    }

    /// The experts of layer index `i`, as the checkpoint has them.
    fn experts(&self, i: usize, epilogue: Epilogue) -> Result<CpuExperts> {
        let (model, Machine { team, kernel, .. }) = (&self.folder.model, self.machine);
        let job = cache_job("", &self.folder.checkpoint, model, Precision::Bf16);
        let layer = &job.layers[i];
        let &Job { hidden, intermediate, num_experts, kind, .. } = &job;
        let contents = Contents {
            model: "one layer",
            hidden,
            intermediate,
            num_experts,
            kind,
            precision: Precision::Bf16.into(),
            layers: &[0],
        };
        let layout = kind.layout(hidden, intermediate, Precision::Bf16)?;
        let sources = layer.experts.iter().map(|expert| job.sources(expert));
        let sources = sources.collect::<moebius_cache::Result<Vec<_>>>()?;
        let failed = Mutex::new(None);
        let cache = ExpertCache::anonymous(&contents, |_, e, bytes| {
            match packed(&layout, &sources[e]) {
                Ok(packed) => bytes.copy_from_slice(&packed),
                Err(error) => drop(failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error)),
            }
            sources[e].iter().flat_map(Source::parts).for_each(|part| self.folder.checkpoint.release(part));
        })?;
        if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error.into());
        }
        let memory = Arc::new(ExpertMemory::mapped(Arc::new(cache)));
        let top_k = model.moe().map_or(0, |moe| moe.router.top_k);
        Ok(CpuExperts::new(&Heap::default(), memory, team.clone(), *kernel, PART_TOKENS * top_k)?.with(epilogue))
    }

    fn run(&self, take: &mut dyn FnMut(usize, OfExpert<'_>) -> Result<()>) -> Result<()> {
        let model = &self.folder.model;
        let moe = model.moe().expect("seen in new");
        let hidden = moe.expert_width(model.hidden_size);
        let (give, given) = sync_channel(0);
        let (tell, told) = sync_channel(0);
        let epilogue = Epilogue::load(&Heap::default(), &self.folder.checkpoint, model)?;
        std::thread::scope(|scope| {
            let reader = scope.spawn(move || {
                let experts = WatchedExperts { given, tell, layer: None };
                let mut model = self.model(&Heap::default(), &self.folder.checkpoint, Some(Box::new(experts)))?;
                model.forward(&self.batch(), None)
            });
            let converter = move || {
                for (i, epilogue) in epilogue.of_layers().enumerate() {
                    // A reader that has ended says why below.
                    let Ok(()) = give.send(self.experts(i, epilogue)?) else { return Ok(()) };
                    let Ok(read) = told.recv() else { return Ok(()) };
                    let of_layer = read.of_layer(hidden);
                    take(i, &|expert| read.moments(expert, &of_layer, moe.intermediate_size))?;
                }
                Ok(())
            };
            // When it returns, the ends of its channels are gone, and the reader waits no more.
            let converted = converter();
            let read = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            converted.and(read)
        })
    }
}

impl Inputs for CalibrationText<'_> {
    fn each_layer(
        &self,
        take: &mut dyn FnMut(usize, OfExpert<'_>) -> moebius_cache::Result<()>,
    ) -> moebius_cache::Result<()> {
        self.run(&mut |i, moments| Ok(take(i, moments)?)).map_err(|error| match error {
            Error::Cache(error) => error,
            other => moebius_cache::Error::Invalid(other.to_string()),
        })
    }
}

/// llama.cpp's importance matrix: mean squares of what experts read, without the pairs of inputs.
#[derive(Debug)]
pub struct ImportanceMatrix(Vec<[Importances; 2]>); // of each MoE layer: of gate and up, of down

#[derive(Debug)]
struct Importances {
    squares: Vec<f32>, // [experts, inputs]
    inputs: usize,
}

impl ImportanceMatrix {
    /// Of a file for `model`. Errors: it is of another model, or no importance matrix in GGUF.
    pub fn read(path: &Path, model: &ModelConfig) -> Result<Self> {
        let file = Checkpoint::open(path)?;
        let layers = model.moe_layers().map(|(layer, moe)| {
            let read =
                |tensors: &[&str], inputs| Importances::read(&file, path, (layer, tensors), [moe.num_experts, inputs]);
            Ok([
                read(&["ffn_up_exps", "ffn_gate_up_exps"], moe.expert_width(model.hidden_size))?,
                read(&["ffn_down_exps"], moe.intermediate_size)?,
            ])
        });
        layers.collect::<Result<_>>().map(Self)
    }
}

impl Importances {
    /// Of the first of `tensors` that the file has. Source: llama.cpp's tools/imatrix.
    fn read(
        file: &Checkpoint,
        path: &Path,
        (layer, tensors): (usize, &[&str]),
        [experts, inputs]: [usize; 2],
    ) -> Result<Self> {
        let name = |tensor: &str, what: &str| format!("blk.{layer}.{tensor}.weight.{what}");
        let tensor = tensors.iter().find(|tensor| file.has(&name(tensor, "in_sum2"))).unwrap_or(&tensors[0]);
        let numbers = |what: &str, inputs: usize| {
            let name = name(tensor, what);
            let other = |why: String| {
                Error::Invalid(format!(
                    "--calibrate {}: {why}: give an importance matrix of this model",
                    path.display()
                ))
            };
            let view = file.get(&name).ok_or_else(|| other(format!("there is no {name}")))?;
            let count: usize = view.shape.iter().product();
            if count != experts * inputs || view.shape.last() != Some(&inputs) {
                return Err(other(format!("{name} is {:?}, and the model has [{experts}, {inputs}]", view.shape)));
            }
            let mut numbers = vec![0.0; count];
            moebius_cache::codec::decode_f32(&view, &mut numbers)?;
            Ok(numbers)
        };
        let (mut squares, counts) = (numbers("in_sum2", inputs)?, numbers("counts", 1)?);
        for (squares, count) in squares.chunks_exact_mut(inputs).zip(counts) {
            squares.iter_mut().for_each(|sum| *sum = (*sum / count.max(1.0)).max(0.0));
        }
        Ok(Self { squares, inputs })
    }

    fn moments(&self, expert: usize) -> Moments {
        Moments::of_squares(&self.squares[expert * self.inputs..][..self.inputs])
    }
}

impl Inputs for ImportanceMatrix {
    fn each_layer(
        &self,
        take: &mut dyn FnMut(usize, OfExpert<'_>) -> moebius_cache::Result<()>,
    ) -> moebius_cache::Result<()> {
        self.0.iter().enumerate().try_for_each(|(i, [hidden, intermediate])| {
            let of =
                |expert| ExpertMoments { hidden: hidden.moments(expert), intermediate: intermediate.moments(expert) };
            take(i, &of)
        })
    }
}

/// What the experts of a layer read.
struct Read {
    x: Vec<f32>,                 // [tokens, hidden]
    tokens: Vec<Vec<u32>>,       // of each expert
    intermediate: Vec<Vec<f32>>, // of each expert, [its tokens, intermediate]
}

impl Read {
    /// Of all experts, from tokens that are spread over the text.
    fn of_layer(&self, hidden: usize) -> Products {
        let tokens = self.x.len() / hidden;
        let every = tokens.div_ceil(LAYER_ROWS * hidden).max(1);
        let x: Vec<f32> = self.x.chunks_exact(hidden).step_by(every).flatten().copied().collect();
        Products::of(hidden, &x)
    }

    fn moments(&self, expert: usize, of_layer: &Products, intermediate: usize) -> ExpertMoments {
        let hidden = of_layer.inputs();
        let rows = self.tokens[expert].iter().map(|&token| &self.x[token as usize * hidden..][..hidden]);
        let x: Vec<f32> = rows.flatten().copied().collect();
        ExpertMoments {
            hidden: Moments::of_hidden(&x, of_layer),
            intermediate: Moments::of_intermediate(intermediate, &self.intermediate[expert]),
        }
    }
}

/// A layer's experts that compute, and keep what they read.
struct WatchedExperts {
    given: Receiver<CpuExperts>, // of one layer after the other
    tell: SyncSender<Read>,
    layer: Option<(CpuExperts, Read, Routing)>,
}

impl ExpertExecutor<Cpu> for WatchedExperts {
    fn submit(&mut self, _: usize, x: &Tensor, routing: &Routing) -> Result<()> {
        let experts = self.given.recv().map_err(|_| stopped())?;
        let count = experts.memory().shape().experts;
        let read = Read { x: x.data().to_vec(), tokens: vec![vec![]; count], intermediate: vec![vec![]; count] };
        self.layer = Some((experts, read, routing.clone()));
        Ok(())
    }

    fn finish(&mut self, out: &mut Tensor) -> Result<()> {
        let (mut experts, mut read, routing) = self.layer.take().expect("finish follows submit");
        let (top_k, hidden) = (routing.top_k, out.cols());
        let width = experts.memory().shape().intermediate();
        let parts = read.x.chunks(PART_TOKENS * hidden).zip(out.data_mut().chunks_mut(PART_TOKENS * hidden));
        for (part, (x, out)) in parts.enumerate() {
            let (first, tokens) = (part * PART_TOKENS, x.len() / hidden);
            let pairs = first * top_k..(first + tokens) * top_k;
            let routing =
                Routing { top_k, ids: routing.ids[pairs.clone()].to_vec(), weights: routing.weights[pairs].to_vec() };
            experts.submit_rows(0, x, &routing)?;
            experts.finish_rows(out)?;
            let mut rows = experts.intermediate_rows().chunks_exact(width);
            for (expert, (of_expert, intermediate)) in read.tokens.iter_mut().zip(&mut read.intermediate).enumerate() {
                for (pair, _) in routing.ids.iter().enumerate().filter(|(_, id)| **id == expert as i32) {
                    of_expert.push((first + pair / top_k) as u32);
                    intermediate.extend_from_slice(rows.next().expect("a row for each pair"));
                }
            }
        }
        self.tell.send(read).map_err(|_| stopped())
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}

/// The converter says why.
fn stopped() -> Error {
    Error::Stopped("the conversion has ended".into())
}

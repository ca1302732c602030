//! Attention on the device: paged keys and values, single rows with the context split among blocks, many rows in tiles.
//!
//! Latent attention is absorbed for single rows and expanded for tiles: the two ways are in a file of their own.

use std::sync::Arc;

use half::bf16;

use super::attend_latent::{LatentOp, LatentScratch, Segment, Single};
use super::batch::{TILE_ROWS, blocks};
use super::load::LatentUp;
use super::product::FEW_TOKENS;
use super::select::{Chosen, Gathered};
use super::{CudaBackend, CudaBatch, Tensor};
use crate::backend::batch::BLOCK_SIZE;
use crate::backend::{Attend, Heads, LatentQueries, Rotary, Softmax};
use crate::config::KvBits;
use crate::cuda::kernels::attention_decode::{COMBINE_COLUMNS, HEADS, KV_GROUP, MOST_VALUE, NO_WINDOW, PAGE};
use crate::cuda::kernels::attention_prefill::COLUMNS;
use crate::cuda::kernels::{self, Kernel, PrepareHeads};
use crate::cuda::{Address, Cuda, DeviceBuffer, launch};
use crate::model::{Indexer, KvDims, Mla, PositionScale, Values, Window};
use crate::{Error, Result};

/// Keys and values of one layer: `[blocks, heads, 64, dim]` each; INT8 with `[groups, 64]` scales behind each head's.
pub struct Kv {
    pub(super) keys: DeviceBuffer<u8>,
    pub(super) values: Option<DeviceBuffer<u8>>, // none: they are the beginning of the keys
    pub(super) heads: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    pub(super) int8: bool,
}

impl Kv {
    pub(super) fn values(&self) -> Address<u8> {
        self.values.as_ref().map_or(Address::NULL, DeviceBuffer::address)
    }

    /// Keys and values, with the bytes of a block of each.
    fn parts(&self) -> impl Iterator<Item = (&DeviceBuffer<u8>, usize)> {
        let bytes = |dim: usize| self.heads * head_bytes(dim, self.int8);
        let values = self.values.iter().map(move |values| (values, bytes(self.value_dim)));
        std::iter::once((&self.keys, bytes(self.key_dim))).chain(values)
    }
}

/// Bytes of a position's row of `dim` numbers, and how many scales it has.
pub(super) fn row_bytes(dim: usize, int8: bool) -> (usize, usize) {
    if int8 { (dim, dim.div_ceil(KV_GROUP)) } else { (2 * dim, 0) }
}

/// Bytes of a block of a head of `dim` numbers.
pub(super) fn head_bytes(dim: usize, int8: bool) -> usize {
    let (codes, scales) = row_bytes(dim, int8);
    BLOCK_SIZE * (codes + size_of::<bf16>() * scales)
}

/// What the parts of a split context leave.
pub(super) struct Workspace {
    pub(super) partial: DeviceBuffer<f32>,
    pub(super) states: DeviceBuffer<f32>,
}

// The cache's blocks are the kernels' pages.
const _: () = assert!(BLOCK_SIZE == PAGE && crate::backend::KV_GROUP == KV_GROUP);

/// Blocks per multiprocessor of single-row attention.
const BLOCKS: usize = 2;

impl Workspace {
    pub(super) fn new(cuda: &Arc<Cuda>) -> Result<Self> {
        // As many (row, head, split) as blocks run at a time, each with its values.
        let parts = BLOCKS * cuda.info.multiprocessors * HEADS;
        Ok(Self { partial: DeviceBuffer::new(cuda, parts * MOST_VALUE)?, states: DeviceBuffer::new(cuda, parts * 2)? })
    }
}

type Decode = Kernel<kernels::DecodeArguments>;
type Prefill = Kernel<kernels::PrefillArguments>;

/// By cache, bf16 and INT8; smallest heads first.
const DECODE: [[Decode; 6]; 2] = [
    [
        kernels::attend_decode_64_64_bf16,
        kernels::attend_decode_96_96_bf16,
        kernels::attend_decode_128_128_bf16,
        kernels::attend_decode_192_128_bf16,
        kernels::attend_decode_256_256_bf16,
        kernels::attend_decode_512_512_bf16,
    ],
    [
        kernels::attend_decode_64_64_int8,
        kernels::attend_decode_96_96_int8,
        kernels::attend_decode_128_128_int8,
        kernels::attend_decode_192_128_int8,
        kernels::attend_decode_256_256_int8,
        kernels::attend_decode_512_512_int8,
    ],
];
const PREFILL: [[Prefill; 6]; 2] = [
    [
        kernels::attend_prefill_64_64_bf16,
        kernels::attend_prefill_96_96_bf16,
        kernels::attend_prefill_128_128_bf16,
        kernels::attend_prefill_192_128_bf16,
        kernels::attend_prefill_256_256_bf16,
        kernels::attend_prefill_512_512_bf16,
    ],
    [
        kernels::attend_prefill_64_64_int8,
        kernels::attend_prefill_96_96_int8,
        kernels::attend_prefill_128_128_int8,
        kernels::attend_prefill_192_128_int8,
        kernels::attend_prefill_256_256_int8,
        kernels::attend_prefill_512_512_int8,
    ],
];

/// The first kernel that holds both dimensions.
pub(super) fn holding<A>(family: &[Kernel<A>], key: usize, value: usize) -> Option<Kernel<A>> {
    family.iter().find(|kernel| key <= kernel.tile[0] && value <= kernel.tile[1]).copied()
}

/// Of a kernel for a head's dimensions: there is none for wider heads.
pub(super) const REFUSED: &str = "wider heads are refused when loading";

impl From<Heads<'_, CudaBackend>> for kernels::Heads {
    fn from(h: Heads<'_, CudaBackend>) -> Self {
        let (norm, norm_width, eps) =
            h.norm.map_or((Address::NULL, 0, 0.0), |(w, width, eps)| (w.address(), width, eps));
        Self {
            x: h.x.bf16(),
            norm,
            heads: h.heads as i32,
            dim: h.dim as i32,
            norm_width: norm_width as i32,
            at: h.rope_at as i32,
            eps,
        }
    }
}

/// A window as kernels have it.
fn window_of(softmax: &Softmax<'_, CudaBackend>) -> kernels::Window {
    let (len, chunks) = match softmax.window {
        None => (NO_WINDOW, 0),
        Some(Window::Sliding(len)) => (len, 0),
        Some(Window::Chunk(len)) => (len, 1),
    };
    kernels::Window { len: len.min(NO_WINDOW) as i32, chunks }
}

impl CudaBackend {
    /// Attention of rows that are read one by one.
    fn attend_single(&self, kv: &Kv, softmax: &Softmax<'_, Self>, single: &Single, q: &Tensor, out: &Tensor) {
        let (heads, window, count) = (q.cols / kv.key_dim, window_of(softmax), single.count);
        let sinks = softmax.sinks.map_or(Address::NULL, DeviceBuffer::address);
        let parts = kv.heads * (heads / kv.heads).div_ceil(HEADS);
        // A window may begin and end within pages.
        let pages = blocks(single.context).min(blocks(window.len as usize) + 1);
        let splits = (BLOCKS * self.cuda.info.multiprocessors / (count * parts)).clamp(1, pages.min(128));
        let kernel = holding(&DECODE[usize::from(kv.int8)], kv.key_dim, kv.value_dim).expect(REFUSED);
        let (q, out) = (q.bf16().add(single.first * q.cols), out.bf16().add(single.first * out.cols));
        launch!(self.cuda, &self.cuda.compute, kernel, [splits, parts, count];
            q, single.keys, single.values, out, self.attention.partial.address(), self.attention.states.address(),
            single.rows, single.positions, single.token_seq, single.seq_blocks, single.block_table, heads as i32,
            kv.heads as i32, kv.key_dim as i32, kv.value_dim as i32, softmax.scale, window, sinks,
            single.table_stride as i32, i32::from(single.early));
        self.combine((count, single.rows), splits, heads, kv.value_dim, sinks, out);
    }

    /// Attention of rows that are read in tiles.
    fn attend_tiles(&self, kv: &Kv, batch: &CudaBatch, softmax: &Softmax<'_, Self>, q: &Tensor, out: &Tensor) {
        let (heads, window) = (q.cols / kv.key_dim, window_of(softmax));
        let sinks = softmax.sinks.map_or(Address::NULL, DeviceBuffer::address);
        let kernel = holding(&PREFILL[usize::from(kv.int8)], kv.key_dim, kv.value_dim).expect(REFUSED);
        let which = usize::from(kernel.tile[2] == TILE_ROWS[1]);
        launch!(self.cuda, &self.cuda.compute, kernel, [heads, batch.tiles[which], kv.value_dim.div_ceil(COLUMNS)];
            q.bf16(), kv.keys.address(), kv.values(), out.bf16(), batch.tile_table(which), batch.seq_first(),
            batch.positions(), batch.seq_blocks(), batch.block_table(), heads as i32, kv.heads as i32,
            kv.key_dim as i32, kv.value_dim as i32, softmax.scale, window, sinks);
    }

    /// Puts the parts of a split context together.
    pub(super) fn combine(
        &self,
        (count, rows): (usize, Address<i32>),
        splits: usize,
        heads: usize,
        value_dim: usize,
        sinks: Address<f32>,
        out: Address<bf16>,
    ) {
        if splits > 1 {
            let grid = [count * heads, value_dim.div_ceil(COMBINE_COLUMNS), 1];
            launch!(self.cuda, &self.cuda.compute, kernels::attend_combine, grid;
                self.attention.partial.address(), self.attention.states.address(), out, rows, splits as i32,
                heads as i32, value_dim as i32, sinks);
        }
    }
}

impl CudaBackend {
    /// Rotates columns of every head; with `back` 1 in the other direction.
    fn turn_heads(&self, x: &mut Tensor, head_dim: usize, at: usize, rotary: &Rotary<'_, Self>, back: i32) {
        let &Rotary { angles, interleaved } = rotary;
        launch!(self.cuda, &self.cuda.compute, kernels::rope, [x.rows, 1, 1];
            x.bf16(), angles.f32(), (x.cols / head_dim) as i32, head_dim as i32, at as i32, (angles.cols / 2) as i32,
            i32::from(interleaved), back);
    }
}

impl Attend for CudaBackend {
    type Kv = Kv;
    type LatentScratch = LatentScratch;
    type Chosen = Chosen;
    type Gathered = Gathered;

    fn kv(&self, blocks: usize, (heads, key_dim, values): KvDims, bits: KvBits) -> Result<Kv> {
        let int8 = match bits {
            KvBits::Bf16 => false,
            KvBits::Int8 => true,
            KvBits::Bf16x2 => {
                return Err(Error::Invalid(
                    "--kv bf16x2 is for the CPU: use --kv bf16 or int8, or --device cpu".into(),
                ));
            }
        };
        let bytes = |dim: usize| blocks * heads * head_bytes(dim, int8);
        let own = match values {
            Values::Own(dim) => Some(DeviceBuffer::zeros(&self.cuda, bytes(dim))?),
            Values::OfKeys(_) => None,
        };
        let keys = DeviceBuffer::zeros(&self.cuda, bytes(key_dim))?;
        Ok(Kv { keys, values: own, heads, key_dim, value_dim: values.dim(), int8 })
    }

    fn kv_block_bytes(&self, kv: &Kv) -> usize {
        kv.parts().map(|(_, bytes)| bytes).sum()
    }

    fn kv_to_host(&self, kv: &Kv, block: usize, mut out: &mut [u8]) {
        for (part, bytes) in kv.parts() {
            let (to, rest) = out.split_at_mut(bytes);
            self.cuda.download(&self.cuda.compute, part.address().add(block * bytes), to);
            out = rest;
        }
    }

    fn kv_to_device(&self, kv: &mut Kv, block: usize, mut from: &[u8]) {
        for (part, bytes) in kv.parts() {
            let (of_part, rest) = from.split_at(bytes);
            self.cuda.upload(&self.cuda.compute, part.address().add(block * bytes), of_part);
            from = rest;
        }
    }

    fn gathered(&self, kv: &Kv, indexer: &Indexer, max_tokens: usize) -> Result<Gathered> {
        Gathered::new(self, kv, indexer, max_tokens)
    }

    fn rope_angles(&self, inv_freq: &DeviceBuffer<f32>, factor: f32, batch: &CudaBatch, out: &mut Tensor) {
        launch!(self.cuda, &self.cuda.compute, kernels::rope_angles, [out.rows, 1, 1];
            batch.positions().cast(), inv_freq.address(), factor, out.f32(), inv_freq.len() as i32);
    }

    fn scale_by_position(&self, x: &mut Tensor, batch: &CudaBatch, scale: &PositionScale) {
        launch!(self.cuda, &self.cuda.compute, kernels::scale_by_position, [x.rows, 1, 1];
            x.bf16(), batch.positions(), scale.beta, scale.length, scale.offset, x.cols as i32);
    }

    fn rope(&self, x: &mut Tensor, head_dim: usize, at: usize, rotary: &Rotary<'_, Self>) {
        self.turn_heads(x, head_dim, at, rotary, 0);
    }

    fn rope_back(&self, x: &mut Tensor, head_dim: usize, at: usize, rotary: &Rotary<'_, Self>) {
        self.turn_heads(x, head_dim, at, rotary, 1);
    }

    fn kv_write(&self, kv: &mut Kv, batch: &CudaBatch, key: &Tensor, value: Option<&Tensor>) {
        let kernel = if kv.int8 { kernels::kv_write_int8 } else { kernels::kv_write_bf16 };
        assert_eq!(value.is_some(), kv.values.is_some());
        let value = value.map_or(Address::NULL, Tensor::bf16);
        launch!(self.cuda, &self.cuda.compute, kernel, [batch.rows(), 1, 1];
            key.bf16(), value, kv.keys.address(), kv.values(), batch.positions(), batch.token_seq(),
            batch.seq_blocks(), batch.block_table(), batch.rows() as i32, kv.heads as i32, kv.key_dim as i32,
            kv.value_dim as i32);
    }

    fn prepare_heads(
        &self,
        kv: &mut Kv,
        batch: &CudaBatch,
        rotary: Option<&Rotary<'_, Self>>,
        q: Heads<'_, Self>,
        k: Heads<'_, Self>,
        v: Option<&Tensor>,
    ) {
        assert_eq!(v.is_some(), kv.values.is_some());
        let independent = self.cuda.take_independent();
        assert!(!independent || q.norm.is_none(), "a norm rewrites what may still be read");
        let kernel = if kv.int8 { kernels::prepare_heads_int8 } else { kernels::prepare_heads_bf16 };
        let runs = q.heads + k.heads + if v.is_some() { k.heads } else { 0 };
        let argument = PrepareHeads {
            q: q.into(),
            k: k.into(),
            v: v.map_or(Address::NULL, Tensor::bf16),
            angles: rotary.map_or(Address::NULL, |rotary| rotary.angles.f32()),
            keys: kv.keys.address(),
            values: kv.values(),
            positions: batch.positions(),
            token_seq: batch.token_seq(),
            seq_blocks: batch.seq_blocks(),
            block_table: batch.block_table(),
            v_dim: kv.value_dim as i32,
            half: rotary.map_or(0, |rotary| rotary.angles.cols / 2) as i32,
            interleaved: i32::from(rotary.is_some_and(|rotary| rotary.interleaved)),
            independent: i32::from(independent),
        };
        let grid = [batch.rows(), runs.div_ceil(kernels::attention_heads::HEADS_WARPS), 1];
        launch!(self.cuda, &self.cuda.compute, kernel, grid; argument);
    }

    fn attend(&self, kv: &Kv, batch: &CudaBatch, softmax: &Softmax<'_, Self>, q: &Tensor, out: &mut Tensor) {
        let heads = q.cols / kv.key_dim;
        assert!(heads * kv.key_dim == q.cols && heads * kv.value_dim == out.cols && heads.is_multiple_of(kv.heads));
        // A window as long as the context hides nothing.
        let hides = |window: &Window| window.first_seen(self.limits.context.saturating_sub(1)) > 0;
        let softmax = &Softmax { window: softmax.window.filter(hides), ..*softmax };
        // Of a prompt that selects, the first rows attend to all that they see. What tiles make of others is written
        // over.
        let in_tiles = |start: usize| softmax.choice.is_none_or(|choice| start < choice.chosen.most);
        if batch.long.iter().any(|&(_, _, start)| in_tiles(start))
            && !self.attend_wgmma(kv, batch, heads, softmax, q, out)
        {
            self.attend_tiles(kv, batch, softmax, q, out);
        }
        match softmax.choice {
            Some(choice) => {
                for (wave, _) in choice.chosen.waves(batch, 0, choice.gathered.wave) {
                    let single = self.side_by_side(kv, batch, choice, &wave);
                    self.attend_single(kv, softmax, &single, q, out);
                }
            }
            None if batch.decode > 0 => {
                self.attend_single(kv, softmax, &Single::of(batch, kv, self.limits.context), q, out);
            }
            None => {}
        }
    }

    fn latent_scratch(&self, config: &Mla, max_tokens: usize) -> Result<LatentScratch> {
        LatentScratch::new(self, config, max_tokens, self.limits.context)
    }

    fn absorb_latent(
        &self,
        batch: &CudaBatch,
        up: &LatentUp,
        scratch: &mut LatentScratch,
        queries: LatentQueries<'_, Self>,
    ) {
        // Those that choose come in waves, which share the scratch.
        if queries.1.is_none() && batch.decode > 0 {
            self.absorb(up, scratch, queries.0, 0..batch.decode);
            if batch.decode <= FEW_TOKENS {
                // It writes nothing but its scratch, and reads of queries what is not rotated.
                self.cuda.promise_independent();
            }
        }
    }

    fn attend_latent(
        &self,
        kv: &Kv,
        batch: &CudaBatch,
        up: &LatentUp,
        scratch: &mut LatentScratch,
        (q, choice): LatentQueries<'_, Self>,
        out: &mut Tensor,
    ) {
        let op = LatentOp { kv, batch, up, scratch, q, out };
        match choice {
            Some(choice) => {
                for (wave, _) in choice.chosen.waves(batch, 0, choice.gathered.wave) {
                    let single = self.side_by_side(kv, batch, choice, &wave);
                    self.absorb(up, op.scratch, q, single.first..single.first + single.count);
                    self.attend_absorbed(&op, &single);
                }
            }
            None if batch.decode > 0 => self.attend_absorbed(&op, &Single::of(batch, kv, self.limits.context)),
            None => {}
        }
        for (sequence, rows, start) in &batch.long {
            // The first rows of a prompt attend to all that they see.
            let all = choice.map_or(rows.len(), |choice| choice.chosen.most.saturating_sub(*start).min(rows.len()));
            let all = rows.start..rows.start + all;
            let end = if all.is_empty() { 0 } else { start + all.len() };
            for from in (0..end).step_by(scratch.segment) {
                let positions = from..end.min(from + scratch.segment);
                self.attend_expanded(&op, &Segment { sequence: *sequence, rows: all.clone(), positions, end });
            }
        }
    }
}

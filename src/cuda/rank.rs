//! Devices that read and write each other's memory, to sum what each has computed (kernels/all_reduce.cu).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUresult;

use super::beside::{self, Beside};
use super::hop::enable_access;
pub(crate) use super::kernels::all_reduce::MAX_RANKS;
use super::kernels::all_reduce::{FEW_NUMBERS, INBOX_BYTES, MANY_BLOCKS, MANY_THREADS, REDUCE_THREADS, STAMPS};
use super::kernels::{self, launch};
use super::kernels::{Columns, RankSum};
use super::{Address, Cuda, DeviceBuffer, Graph, PinnedBuffer};
use crate::{Error, Result};

/// How long devices may take for their first sums.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same where threads of a busy CPU are the devices.
const EMULATED_PATIENCE: Duration = Duration::from_secs(120);

/// One of several devices.
pub struct Rank {
    cuda: Arc<Cuda>,
    of_kernels: RankSum,
    _inbox: DeviceBuffer<u8>,
    _stamps: DeviceBuffer<u32>,
    beside: Option<Beside>,           // `None`: a plan
    terms: Option<DeviceBuffer<f32>>, // of the others
    stop: Arc<PinnedBuffer<u32>>,     // one number: a rank has failed
}

/// What a kernel is told that sums with nobody.
pub(crate) const ALONE: RankSum =
    RankSum { inbox: [Address::NULL; MAX_RANKS], stamps: Address::NULL, stop: Address::NULL, rank: 0, ranks: 1 };

impl Rank {
    /// Ranks of these devices, in their order, once their sums have been seen to be right.
    ///
    /// Errors: `Error::Device` where one cannot use another's memory, or what it reads there is not what was written;
    /// `Error::Resources`.
    pub fn of_devices(devices: &[Arc<Cuda>]) -> Result<Vec<Self>> {
        assert!(devices.len() <= MAX_RANKS, "an inbox has room for {MAX_RANKS} ranks");
        for (a, from) in devices.iter().enumerate() {
            from.enter_thread()?;
            if !from.info.is_emulated() {
                from.kernels.load_all()?;
            }
            for (b, to) in devices.iter().enumerate().filter(|(b, _)| *b != a) {
                enable_access(to, &format!("access of GPU {a} of the list to the memory of GPU {b}"))
                    .map_err(|e| Error::Device(format!("{e}: give one GPU, as in --device cuda:0")))?;
            }
        }
        devices[0].enter_thread()?;
        let stop = Arc::new(PinnedBuffer::new(&devices[0], 1)?);
        let inbox = |cuda: &Arc<Cuda>| {
            cuda.enter_thread()?;
            let inbox = DeviceBuffer::zeros(cuda, INBOX_BYTES)?;
            cuda.synchronize()?;
            Ok(inbox)
        };
        let inboxes = devices.iter().map(inbox).collect::<Result<Vec<_>>>()?;
        let mut all = [Address::NULL; MAX_RANKS];
        all.iter_mut().zip(&inboxes).for_each(|(to, inbox)| *to = inbox.address());
        let beside = Beside::of_devices(devices)?;
        let parts = devices.iter().zip(inboxes).zip(beside).enumerate();
        let rank = |(number, ((cuda, inbox), beside)): (usize, ((&Arc<Cuda>, _), _))| {
            cuda.enter_thread()?;
            let (stamps, stop) = (DeviceBuffer::zeros(cuda, STAMPS)?, stop.clone());
            let of_kernels = RankSum {
                inbox: all,
                stamps: stamps.address(),
                stop: stop.address(),
                rank: number as i32,
                ranks: devices.len() as i32,
            };
            let cuda = cuda.clone();
            Ok(Self { cuda, of_kernels, _inbox: inbox, _stamps: stamps, beside: Some(beside), terms: None, stop })
        };
        let ranks = parts.map(rank).collect::<Result<Vec<_>>>()?;
        test(&ranks)?;
        devices[0].enter_thread()?;
        Ok(ranks)
    }

    /// One that only counts what it takes.
    pub fn planned(cuda: &Arc<Cuda>, number: usize, of: usize) -> Result<Self> {
        Ok(Self {
            cuda: cuda.clone(),
            of_kernels: RankSum { rank: number as i32, ranks: of as i32, ..ALONE },
            _inbox: DeviceBuffer::new(cuda, INBOX_BYTES)?,
            _stamps: DeviceBuffer::new(cuda, STAMPS)?,
            beside: None,
            terms: None,
            stop: Arc::new(PinnedBuffer::new(cuda, 1)?),
        })
    }

    /// Counted from 0.
    pub fn number(&self) -> usize {
        self.of_kernels.rank as usize
    }

    /// How many ranks there are.
    pub fn of(&self) -> usize {
        self.of_kernels.ranks as usize
    }

    /// What a kernel is told that sums `numbers` numbers of its own over all ranks; `None`: they are too many.
    pub(crate) fn within_kernels(&self, numbers: usize) -> Option<RankSum> {
        (numbers <= FEW_NUMBERS).then_some(self.of_kernels)
    }

    /// Enqueues `x = x_0 + x_1 + ...` over all ranks, of `numbers` numbers, a multiple of 4.
    pub fn all_reduce(&self, x: Address<f32>, numbers: usize) {
        let (cuda, stream) = (&self.cuda, &self.cuda.compute);
        if let Some(sum) = self.within_kernels(numbers) {
            launch!(cuda, stream, kernels::all_reduce, [numbers.div_ceil(REDUCE_THREADS), 1, 1];
                sum, x, numbers as i32);
            return;
        }
        let of_a_rank = (numbers / 4).div_ceil(self.of());
        launch!(cuda, stream, kernels::all_reduce_many, [of_a_rank.div_ceil(MANY_THREADS).min(MANY_BLOCKS), 1, 1];
            self.of_kernels, x, numbers as i32);
    }

    /// Called before each sum of a pass is enqueued: no rank's thread gets far ahead of another's.
    pub(crate) fn keep_pace(&self) {
        if let Some(beside) = &self.beside {
            beside.keep_pace(&|| self.has_failed());
        }
    }

    /// Takes room for sums beside other ops of up to `numbers` numbers. Errors: `Error::Resources`.
    pub fn room_for_sums(&mut self, numbers: usize) -> Result<()> {
        self.terms = Some(DeviceBuffer::new(&self.cuda, beside::terms(numbers, self.of()))?);
        Ok(())
    }

    /// Whether there is such room.
    pub(crate) fn has_room_for_sums(&self) -> bool {
        self.terms.is_some()
    }

    /// Enqueues the same of many numbers beside what follows, and returns which sum it is, which
    /// [`wait_for_sum`](Rank::wait_for_sum) lets what follows see. Panics: there is no room for it.
    pub fn all_reduce_beside(&self, x: Address<f32>, numbers: usize) -> usize {
        let terms = self.terms.as_ref().filter(|terms| beside::terms(numbers, self.of()) <= terms.len());
        let (beside, terms) = self.beside.as_ref().zip(terms).expect("there is room for the sum");
        beside.sum(&self.cuda, (x, numbers), terms.address(), &|| self.has_failed())
    }

    /// Lets what follows see a sum of [`all_reduce_beside`](Rank::all_reduce_beside).
    pub fn wait_for_sum(&self, sum: usize) {
        if let Some(beside) = &self.beside {
            beside.wait(&self.cuda, sum, &|| self.has_failed());
        }
    }

    /// Enqueues what brings the ranks' columns of `rows` rows side by side into `out`, `[rows, all]`, a multiple of 4
    /// numbers. `columns`: each rank's, in their order; `x` has those of this one.
    pub fn gather_columns(
        &self,
        (x, rows): (Address<f32>, usize),
        columns: &[Range<usize>],
        (out, all): (Address<f32>, usize),
    ) {
        let most = columns.iter().map(Range::len).max().unwrap_or(0);
        if let (1, Some(sum)) = (rows, self.within_kernels(most)) {
            let mut of_ranks = Columns { first: [all as i32; MAX_RANKS + 1] };
            of_ranks.first.iter_mut().zip(columns).for_each(|(to, columns)| *to = columns.start as i32);
            launch!(self.cuda, &self.cuda.compute, kernels::gather_columns, [most.div_ceil(REDUCE_THREADS), 1, 1];
                sum, of_ranks, x, out, most as i32);
            return;
        }
        let Range { start: first, end } = columns[self.number()].clone();
        let cols = end - first;
        launch!(self.cuda, &self.cuda.compute, kernels::place_columns, [rows, all.div_ceil(REDUCE_THREADS), 1];
            x, out, cols as i32, first as i32, all as i32);
        self.all_reduce(out, rows * all);
    }

    /// Seconds that a sum of `numbers` numbers takes within a recorded pass. `ranks` are all that there are.
    pub fn sum_seconds(ranks: &[Self], numbers: usize) -> Result<f64> {
        let (sums, runs) = if ranks[0].cuda.info.is_emulated() { (2, 1) } else { (100, 5) };
        let mut graphs = Vec::new();
        for rank in ranks {
            rank.cuda.enter_thread()?;
            let x = DeviceBuffer::<f32>::zeros(&rank.cuda, numbers)?;
            let graph = Graph::record(&rank.cuda, || {
                (0..sums).for_each(|_| rank.all_reduce(x.address(), numbers));
                Ok(())
            })?;
            graphs.push((graph, x));
        }
        let mut best = f64::INFINITY;
        for _ in 0..runs {
            let since = Instant::now();
            for (rank, (graph, _)) in ranks.iter().zip(&graphs) {
                rank.cuda.enter_thread()?;
                graph.launch();
            }
            ranks.iter().try_for_each(|rank| rank.cuda.synchronize())?;
            best = best.min(since.elapsed().as_secs_f64());
        }
        ranks[0].cuda.enter_thread()?;
        Ok(best / f64::from(sums))
    }

    fn has_failed(&self) -> bool {
        self.stop.atomic(0).load(Acquire) != 0
    }

    /// Lets all ranks go on that wait for others: this one has failed.
    pub fn give_up(&self) {
        self.stop.atomic(0).store(1, Release);
    }
}

/// Sums numbers over all ranks, few and many, several times. Errors: one is wrong, or never comes.
fn test(ranks: &[Rank]) -> Result<()> {
    let wrong = |what: String| {
        Error::Device(format!("GPUs {what} through each other's memory: give one GPU, as in --device cuda:0"))
    };
    let number = |rank: usize, i: usize| ((i * (2 * rank + 3) + rank) % 4093) as f32;
    let length = if ranks[0].cuda.info.is_emulated() { FEW_NUMBERS + 2052 } else { 1 << 22 };
    let patience = if ranks[0].cuda.info.is_emulated() { EMULATED_PATIENCE } else { PATIENCE };
    for numbers in [2048, FEW_NUMBERS, length, 256, length - 4] {
        let mut buffers = Vec::new();
        for (r, rank) in ranks.iter().enumerate() {
            rank.cuda.enter_thread()?;
            let own: Vec<f32> = (0..numbers).map(|i| number(r, i)).collect();
            buffers.push(DeviceBuffer::from_slice(&rank.cuda, &own)?);
        }
        for (rank, x) in ranks.iter().zip(&buffers) {
            rank.cuda.enter_thread()?;
            rank.all_reduce(x.address(), numbers);
        }
        let since = Instant::now();
        let running = |rank: &Rank| rank.cuda.compute.query() == CUresult::CUDA_ERROR_NOT_READY;
        for rank in ranks {
            rank.cuda.enter_thread()?;
            while running(rank) && since.elapsed() < patience {
                std::thread::yield_now();
            }
            if running(rank) {
                ranks[0].give_up();
            }
        }
        if since.elapsed() >= patience {
            return Err(wrong("do not hear of each other".into()));
        }
        for (rank, x) in ranks.iter().zip(&buffers) {
            rank.cuda.enter_thread()?;
            let mut sums = vec![0.0; numbers];
            x.read(&mut sums)?;
            let want = |i: usize| (0..ranks.len()).map(|r| number(r, i)).sum::<f32>();
            if let Some(i) = (0..numbers).find(|&i| sums[i] != want(i)) {
                return Err(wrong(format!("read {} where {} was written", sums[i], want(i))));
            }
        }
    }
    Ok(())
}

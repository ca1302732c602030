//! A model on several devices: every rank runs the same pass over its share, on a thread of its own, the first one on
//! the caller's. They meet in the sums of `join`, on the devices.
//!
//! A rank that fails says so, so that no device waits for it; from then on every call fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::block_pool::BlockMove;
use super::tap::Tap;
use super::{Forward, Measure, Model};
use crate::backend::batch::Batch;
use crate::backend::tensor::Shortlist;
use crate::backend::{Backend, OpTime, Rates};
use crate::experts::Traffic;
use crate::model::ModelConfig;
use crate::{Error, Result};

/// How long a rank looks for its next pass before it sleeps.
const AWAKE: Duration = Duration::from_millis(2);

/// Passes that other ranks may be behind.
const BEHIND: usize = 1;

/// What a rank is asked to do.
type Job<B> = Box<dyn FnOnce(&mut Model<B>) -> Result<()> + Send>;

/// A model of which each of several devices has a share.
pub struct Ranks<B: Backend> {
    first: Model<B>,
    others: Vec<Other<B>>,
    failed: Option<String>,
}

/// A rank on a thread of its own.
struct Other<B: Backend> {
    jobs: Option<Sender<Job<B>>>, // `None`: it is ending
    done: Receiver<Result<()>>,
    under_way: usize,
    thread: Option<JoinHandle<()>>,
}

impl<B: Backend> Ranks<B> {
    /// The ranks' models in their order.
    pub fn new(first: Model<B>, others: Vec<Model<B>>) -> Self {
        let start = |mut model: Model<B>| {
            let ((jobs, of_rank), (to_first, done)) = (channel::<Job<B>>(), channel());
            let serve = move || {
                let entered = model.enter_thread();
                while let Some(job) = next(&of_rank) {
                    let run =
                        || entered.as_ref().map_or_else(|e| Err(Error::Device(e.to_string())), |()| job(&mut model));
                    let ran = catch_unwind(AssertUnwindSafe(run));
                    let ran =
                        ran.unwrap_or_else(|_| Err(Error::Model("a bug in the pass of one of several GPUs".into())));
                    let ran = ran.and_then(|()| model.backend.synchronize());
                    if ran.is_err() {
                        model.backend.give_up();
                    }
                    if to_first.send(ran).is_err() {
                        return;
                    }
                }
            };
            Other { jobs: Some(jobs), done, under_way: 0, thread: Some(std::thread::spawn(serve)) }
        };
        Self { first, others: others.into_iter().map(start).collect(), failed: None }
    }

    /// Asks all other ranks for the same, without waiting.
    fn ask(&mut self, job: impl Fn(&mut Model<B>) -> Result<()> + Clone + Send + 'static) -> Result<()> {
        self.settle(BEHIND)?;
        for other in &mut self.others {
            let job = job.clone();
            let sent = other.jobs.as_ref().is_some_and(|jobs| jobs.send(Box::new(move |model| job(model))).is_ok());
            other.under_way += usize::from(sent);
        }
        Ok(())
    }

    /// Waits until no rank is more than `behind` jobs behind. Errors: one of them has failed, now or ever.
    fn settle(&mut self, behind: usize) -> Result<()> {
        settle(&mut self.others, &mut self.failed, behind)
    }

    /// Lets other ranks compute their part of logits, where the vocabulary is divided.
    fn ask_for_logits(&mut self, rows: &[usize]) -> Result<()> {
        if !self.first.head.is_divided() {
            return Ok(());
        }
        let rows: Arc<[usize]> = rows.into();
        self.ask(move |model| {
            model.compute_logits(&rows);
            Ok(())
        })
    }

    /// Starts or stops to time ops on all ranks, none of which is in a pass then.
    fn profiling(&mut self, on: bool) -> Result<()> {
        self.settle(0)?;
        self.first.backend.profiling(on)?;
        self.ask(move |model| model.backend.profiling(on))?;
        self.settle(0)
    }

    /// Lets the others go on where the first has failed.
    fn checked<T>(&mut self, done: Result<T>) -> Result<T> {
        if let Err(error) = &done {
            self.first.backend.give_up();
            self.failed.get_or_insert_with(|| error.to_string());
        }
        done
    }
}

fn settle<B: Backend>(others: &mut [Other<B>], failed: &mut Option<String>, behind: usize) -> Result<()> {
    for other in others {
        while other.under_way > behind {
            let done = other.done.recv().unwrap_or_else(|_| Err(Error::Device("a GPU's thread has ended".into())));
            other.under_way -= 1;
            if let Err(error) = done {
                failed.get_or_insert_with(|| error.to_string());
            }
        }
    }
    match failed {
        None => Ok(()),
        Some(why) => Err(Error::Device(format!("one of several GPUs has failed: {why}"))),
    }
}

/// The next job; `None`: there will be no more.
fn next<B: Backend>(jobs: &Receiver<Job<B>>) -> Option<Job<B>> {
    let since = Instant::now();
    while since.elapsed() < AWAKE {
        match jobs.try_recv() {
            Ok(job) => return Some(job),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => std::hint::spin_loop(),
        }
    }
    jobs.recv().ok()
}

impl<B: Backend> Drop for Ranks<B> {
    fn drop(&mut self) {
        for other in &mut self.others {
            other.jobs = None;
            if let Some(thread) = other.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

impl<B: Backend> Forward for Ranks<B> {
    fn config(&self) -> &ModelConfig {
        self.first.config()
    }

    fn forward(&mut self, batch: &Batch, tap: Option<&mut Tap>) -> Result<()> {
        // What is taken is the same on all ranks, but only passes of one kind meet in their sums.
        let like = tap.as_ref().map(|tap| (tap.additions.clone(), tap.takes.clone()));
        let copy = Arc::new(batch.clone());
        self.ask(move |model| {
            let tap = |(additions, takes)| Tap { additions, takes, ..Tap::default() };
            model.forward(&copy, like.clone().map(tap).as_mut())
        })?;
        let done = self.first.forward(batch, tap);
        self.checked(done)
    }

    fn save_state(&mut self, slot: usize, snapshot: usize) {
        // A failure is told by the next pass.
        let _ = self.ask(move |model| {
            Forward::save_state(model, slot, snapshot);
            Ok(())
        });
        self.first.save_state(slot, snapshot);
    }

    fn restore_state(&mut self, slot: usize, snapshot: usize) {
        let _ = self.ask(move |model| {
            Forward::restore_state(model, slot, snapshot);
            Ok(())
        });
        self.first.restore_state(slot, snapshot);
    }

    fn move_block(&mut self, moved: BlockMove) {
        let _ = self.ask(move |model| {
            Forward::move_block(model, moved);
            Ok(())
        });
        self.first.move_block(moved);
    }

    fn hold(&mut self, vectors: &mut dyn Iterator<Item = &Arc<[f32]>>) -> Result<()> {
        // While nobody else has them, so that all ranks give up the same ones.
        self.settle(0)?;
        let all: Arc<[Arc<[f32]>]> = vectors.cloned().collect();
        self.first.hold(&mut all.iter())?;
        self.ask(move |model| Forward::hold(model, &mut all.iter()))?;
        self.settle(0)
    }

    fn logits(&mut self, rows: &[usize]) -> Result<&mut [f32]> {
        self.ask_for_logits(rows)?;
        self.first.compute_logits(rows);
        let done = self.first.backend.synchronize();
        self.checked(done)?;
        self.settle(0)?;
        self.first.whole_rows()
    }

    fn shortlists(&mut self, rows: &[usize], inverse_temperatures: &[f32], out: &mut Vec<Shortlist>) -> Result<()> {
        self.ask_for_logits(rows)?;
        let done = self.first.shortlists(rows, inverse_temperatures, out);
        self.checked(done)?;
        self.settle(0)
    }

    fn whole_rows(&mut self) -> Result<&mut [f32]> {
        self.first.whole_rows()
    }

    fn max_logit_rows(&self) -> usize {
        self.first.max_logit_rows()
    }

    fn enter_thread(&self) -> Result<()> {
        self.first.enter_thread()
    }
}

impl<B: Backend> Measure for Ranks<B> {
    fn ranks(&self) -> usize {
        1 + self.others.len()
    }

    fn resident_bytes_per_token(&self) -> u64 {
        self.first.resident_bytes_per_token()
    }

    fn traffic(&self) -> Traffic {
        self.first.traffic()
    }

    fn resident_experts(&self) -> usize {
        self.first.resident_experts()
    }

    fn foresight_gain(&self, tokens: usize) -> Option<f32> {
        self.first.foresight_gain(tokens)
    }

    fn rates(&self) -> Result<Option<Rates>> {
        self.first.rates()
    }

    fn choose(&mut self, ids: &[i32], guesses: &[i32], tokens: usize) -> Result<()> {
        let (of_others, foreseen): (Arc<[i32]>, Arc<[i32]>) = (ids.into(), guesses.into());
        self.ask(move |model| model.choose(&of_others, &foreseen, tokens))?;
        self.first.choose(ids, guesses, tokens)
    }

    fn profile(&mut self, batch: &Batch) -> Result<Vec<OpTime>> {
        let copy = Arc::new(batch.clone());
        self.profiling(true)?;
        self.ask(move |model| model.profiled(&copy).map(drop))?;
        let times = self.first.profiled(batch);
        let times = self.checked(times)?;
        self.profiling(false)?;
        Ok(times)
    }
}

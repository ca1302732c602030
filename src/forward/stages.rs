//! A model on several devices, each of which has a run of its layers: residual streams go from one to the next.
//!
//! One thread enqueues the stages' work, one after the other. While a device is at a long prompt's first chunk, the one
//! before it is at the second.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::block_pool::BlockMove;
use super::tap::Tap;
use super::{Forward, Measure, Model};
use crate::Result;
use crate::backend::batch::Batch;
use crate::backend::tensor::Shortlist;
use crate::backend::{Backend, Hooks, OpTime, Rates};
use crate::experts::Traffic;
use crate::model::ModelConfig;

/// A model of which each of several devices has a run of layers.
pub struct Stages<B: Backend> {
    config: ModelConfig, // of the whole model
    stages: Vec<Model<B>>,
    ways: Vec<B::Way>, // from each to the next
}

impl<B: Backend> Stages<B> {
    /// A model of these stages, in their order, for passes of so many tokens. Errors: `Error::Resources`.
    pub fn new(config: ModelConfig, stages: Vec<Model<B>>, tokens: usize) -> Result<Self> {
        let shares = config.connections().map_or(0, |of| 2 * of.rows());
        let numbers = tokens * (config.streams().width() + shares);
        let ways = stages.windows(2).map(|pair| pair[0].backend.way_to(&pair[1].backend, numbers));
        Ok(Self { ways: ways.collect::<Result<_>>()?, config, stages })
    }

    /// Whether residual streams go through RAM somewhere.
    pub fn are_through_ram(&self) -> bool {
        self.ways.iter().any(B::is_through_ram)
    }

    /// The stages, each with the calling thread on its device.
    fn each(&mut self) -> impl Iterator<Item = Result<&mut Model<B>>> {
        self.stages.iter_mut().map(|stage| stage.backend.enter_thread().map(|()| stage))
    }

    /// The stage that makes logits, with the calling thread on its device, once all that it waits for has gone well.
    fn last(&mut self) -> Result<&mut Model<B>> {
        let (last, before) = self.stages.split_last_mut().expect("a model has a stage");
        for stage in before {
            stage.backend.enter_thread()?;
            stage.backend.synchronize()?;
        }
        last.backend.enter_thread()?;
        Ok(last)
    }
}

impl<B: Backend> Drop for Stages<B> {
    fn drop(&mut self) {
        self.ways.clear();
        for stage in self.stages.drain(..) {
            let _ = stage.backend.enter_thread(); // what is on a device is given up there
            drop(stage);
        }
    }
}

impl<B: Backend> Forward for Stages<B> {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn forward(&mut self, batch: &Batch, mut tap: Option<&mut Tap>) -> Result<()> {
        // Recorded passes are all launched before the CPU computes its part of any. One that is not recorded waits for
        // the CPU where it is enqueued, so those before it must not. (Additions that grow drop recordings; the first
        // stage drops its own then, and is enqueued before any other is.)
        let hooks = tap.as_ref().map_or(Hooks::None, |tap| tap.hooks());
        let are_recorded = self.stages.iter().all(|stage| stage.backend.is_recorded(batch, hooks));
        let (mut launched, mut done) = (Vec::new(), Ok(()));
        while launched.len() < self.stages.len() && done.is_ok() {
            let i = launched.len();
            let (before, from) = self.stages.split_at_mut(i);
            let (stage, way) = (&mut from[0], i.checked_sub(1).map(|way| &mut self.ways[way]));
            stage.backend.enter_thread()?;
            done = stage.launch(before.last().zip(way), batch, tap.as_deref_mut()).and_then(|replayed| {
                launched.push(replayed);
                if are_recorded { Ok(()) } else { stage.serve(batch, replayed) }
            });
        }
        // Whatever became of those behind it: a stage's device waits for the CPU.
        for (stage, replayed) in self.stages.iter_mut().zip(launched).filter(|_| are_recorded) {
            let served = stage.backend.enter_thread().and_then(|()| stage.serve(batch, replayed));
            done = done.and(served);
        }
        done
    }

    // A failure of the next three is told by the next pass.

    fn save_state(&mut self, slot: usize, snapshot: usize) {
        self.each().flatten().for_each(|stage| stage.save_state(slot, snapshot));
    }

    fn restore_state(&mut self, slot: usize, snapshot: usize) {
        self.each().flatten().for_each(|stage| stage.restore_state(slot, snapshot));
    }

    fn move_block(&mut self, moved: BlockMove) {
        self.each().flatten().for_each(|stage| stage.move_block(moved));
    }

    fn hold(&mut self, vectors: &mut dyn Iterator<Item = &Arc<[f32]>>) -> Result<()> {
        let (all, devices): (Vec<_>, _) = (vectors.cloned().collect(), self.stages.len());
        self.each().try_for_each(|stage| {
            let Model { steering, backend, .. } = stage?;
            steering.hold(backend, &mut all.iter(), devices)
        })
    }

    fn logits(&mut self, rows: &[usize]) -> Result<&mut [f32]> {
        self.last()?.logits(rows)
    }

    fn shortlists(&mut self, rows: &[usize], inverse_temperatures: &[f32], out: &mut Vec<Shortlist>) -> Result<()> {
        self.last()?.shortlists(rows, inverse_temperatures, out)
    }

    fn whole_rows(&mut self) -> Result<&mut [f32]> {
        self.last()?.whole_rows()
    }

    fn max_logit_rows(&self) -> usize {
        self.stages.last().map_or(0, Forward::max_logit_rows)
    }

    fn enter_thread(&self) -> Result<()> {
        self.stages.iter().try_for_each(|stage| stage.backend.enter_thread())
    }
}

impl<B: Backend> Measure for Stages<B> {
    fn stages(&self) -> usize {
        self.stages.len()
    }

    fn resident_bytes_per_token(&self) -> u64 {
        self.stages.iter().map(Measure::resident_bytes_per_token).sum()
    }

    fn traffic(&self) -> Traffic {
        self.stages.iter().map(Measure::traffic).sum()
    }

    fn resident_experts(&self) -> usize {
        self.stages.iter().map(Measure::resident_experts).min().unwrap_or(0)
    }

    fn foresight_gain(&self, tokens: usize) -> Option<f32> {
        self.stages.iter().find_map(|stage| stage.foresight_gain(tokens))
    }

    fn rates(&self) -> Result<Option<Rates>> {
        self.stages[0].backend.enter_thread()?;
        self.stages[0].rates()
    }

    fn choose(&mut self, ids: &[i32], guesses: &[i32], tokens: usize) -> Result<()> {
        let layers: usize = self.config.moe_layers().count();
        let cut = |all: &[i32], first: usize, count: usize| {
            let each = all.len() / layers.max(1);
            all[first * each..(first + count) * each].to_vec()
        };
        let mut first = 0;
        self.each().try_for_each(|stage| {
            let stage = stage?;
            let count = stage.config.moe_layers().count();
            let own = (cut(ids, first, count), cut(guesses, first, count));
            first += count;
            stage.choose(&own.0, &own.1, tokens)
        })
    }

    fn profile(&mut self, batch: &Batch) -> Result<Vec<OpTime>> {
        let profiling = |stages: &mut Self, on| {
            stages.each().try_for_each(|stage| {
                let stage = stage?;
                stage.backend.synchronize()?;
                stage.backend.profiling(on)
            })
        };
        profiling(self, true)?;
        let times = self.profiled(batch);
        profiling(self, false)?;
        times
    }
}

impl<B: Backend> Stages<B> {
    /// As [`Model::profiled`], over all stages.
    fn profiled(&mut self, batch: &Batch) -> Result<Vec<OpTime>> {
        let mut pass = || {
            self.forward(batch, None)?;
            self.logits(&[batch.len() - 1])?;
            let mut times: BTreeMap<&'static str, OpTime> = BTreeMap::new();
            for stage in self.each() {
                for of in stage?.backend.take_profile()? {
                    let sum = times.entry(of.name).or_insert(OpTime { launches: 0, seconds: 0.0, ..of.clone() });
                    sum.launches += of.launches;
                    sum.seconds += of.seconds;
                }
            }
            Ok(times.into_values().collect())
        };
        pass().and_then(|_: Vec<OpTime>| pass())
    }
}

//! Steering, and times of dispatches; the CPU records no passes.

use std::time::Instant;

use super::Cpu;
use crate::Result;
use crate::backend::batch::Batch;
use crate::backend::tensor::Tensor;
use crate::backend::{Addition, Hooks, OpTime, Record};
use crate::machine::workers::{DispatchTimes, Team};

impl Record for Cpu {
    type Additions = Vec<Addition<Vec<f32>>>;

    fn replay(&self, batch: &Batch, _: Hooks, pass: &mut dyn FnMut() -> Result<()>) -> Result<bool> {
        self.team.fit(batch.len());
        let begun = Instant::now();
        pass()?;
        self.team.took(batch.len(), begun.elapsed().as_secs_f32());
        Ok(false)
    }

    fn profiling(&self, on: bool) -> Result<()> {
        self.team.timing(on);
        Ok(())
    }

    fn take_profile(&self) -> Result<Vec<OpTime>> {
        Ok(op_times(&self.team, "one thread alone"))
    }

    fn additions(&self, _layers: usize) -> Result<Vec<Addition<Vec<f32>>>> {
        Ok(Vec::new())
    }

    fn set_additions(&self, to: &mut Vec<Addition<Vec<f32>>>, mut additions: Vec<Addition<Vec<f32>>>) -> Result<()> {
        additions.sort_by_key(|addition| addition.layer); // stable: of a layer they stay in order
        *to = additions;
        Ok(())
    }

    fn add_vectors(&self, additions: &Vec<Addition<Vec<f32>>>, layer: usize, first: usize, x: &mut Tensor) {
        let from = additions.partition_point(|addition| addition.layer < layer);
        let additions = &additions[from..additions.partition_point(|addition| addition.layer <= layer)];
        if additions.is_empty() {
            return;
        }
        self.each_row(x, |t, row, _| {
            for Addition { vector, coefficient, .. } in
                additions.iter().filter(|addition| addition.rows.contains(&(first + t)))
            {
                for run in row.chunks_exact_mut(vector.len()) {
                    run.iter_mut().zip(&**vector).for_each(|(x, v)| *x += coefficient * v);
                }
            }
        });
    }
}

/// What the team's dispatches took since their times were last taken, what they waited for, and as `rest` all between
/// them.
pub(crate) fn op_times(team: &Team, rest: &'static str) -> Vec<OpTime> {
    let (all, times) = team.take_times();
    let op = |times: &DispatchTimes| OpTime { name: times.name, launches: times.dispatches, seconds: times.work };
    let mut ops: Vec<OpTime> = times.iter().map(op).collect();
    let launches = times.iter().map(|times| times.dispatches).sum();
    let sum = |of: fn(&DispatchTimes) -> f64| times.iter().map(of).sum::<f64>();
    let (work, handover, waiting) = (sum(|times| times.work), sum(|times| times.handover), sum(|times| times.waiting));
    ops.push(OpTime { name: "hand-over to workers", launches, seconds: handover });
    ops.push(OpTime { name: "waiting for the slowest worker", launches, seconds: waiting });
    ops.push(OpTime { name: rest, launches, seconds: all - work - handover - waiting });
    ops
}

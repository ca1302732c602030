//! Steering; the CPU records no passes and keeps no times.

use super::Cpu;
use crate::Result;
use crate::backend::tensor::Tensor;
use crate::backend::{Addition, Record};

impl Record for Cpu {
    type Additions = Vec<Addition<Vec<f32>>>;

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

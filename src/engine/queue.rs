//! The queue's places: how many requests may wait, and how many of one tenant, so that no key keeps the others out.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::engine::metrics::Metrics;
use crate::forward::block_pool::Tenant;
use crate::{Error, Result};

/// Places for requests that wait for their first step.
#[derive(Debug)]
pub(super) struct Queue {
    most: usize,
    metrics: Arc<Metrics>,
    waiting: Mutex<HashMap<Tenant, usize>>,
}

impl Queue {
    /// Of `most` places.
    pub(super) fn new(most: usize, metrics: Arc<Metrics>) -> Self {
        Self { most, metrics, waiting: Mutex::default() }
    }

    /// Errors: `Error::Busy` when too many wait, or too many of `tenant`: a quarter of the places is for the others.
    pub(super) fn place(self: &Arc<Self>, tenant: Tenant) -> Result<QueuePlace> {
        let mut waiting = self.lock();
        let all: usize = waiting.values().sum();
        if all >= self.most {
            return Err(Error::Busy(format!(
                "{all} requests wait already, and no more may: try again in a while, or raise --max-queue"
            )));
        }
        let own = waiting.entry(tenant).or_default();
        if tenant != Tenant::default() && *own >= self.most - self.most / 4 {
            return Err(Error::Busy(format!(
                "{own} requests of this key wait already, and no more may: try again in a while"
            )));
        }
        *own += 1;
        self.metrics.requests_waiting.store(all as u64 + 1, Relaxed);
        Ok(QueuePlace { queue: self.clone(), tenant })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Tenant, usize>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request's place in the queue, until its first step.
#[derive(Debug)]
pub struct QueuePlace {
    queue: Arc<Queue>,
    tenant: Tenant,
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        let mut waiting = self.queue.lock();
        let own = waiting.entry(self.tenant).or_default();
        *own -= 1;
        if *own == 0 {
            waiting.remove(&self.tenant);
        }
        self.queue.metrics.requests_waiting.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_places_is_for_other_keys() {
        let queue = Arc::new(Queue::new(8, Arc::default()));
        let (anna, bert) = (Tenant(1), Tenant(2));
        let mut berts: Vec<QueuePlace> = (0..6).map(|_| queue.place(bert).unwrap()).collect();
        assert!(queue.place(bert).unwrap_err().to_string().contains("of this key"));
        let annas: Vec<QueuePlace> = (0..2).map(|_| queue.place(anna).unwrap()).collect();
        assert!(queue.place(anna).is_err(), "all eight are taken");
        berts.pop();
        assert_eq!(queue.metrics.requests_waiting.load(Relaxed), 7);
        assert!(queue.place(anna).is_ok());
        drop((berts, annas));
        assert!(queue.lock().is_empty() && queue.metrics.requests_waiting.load(Relaxed) == 0);
    }

    #[test]
    fn without_keys_everybody_may_have_all() {
        let queue = Arc::new(Queue::new(4, Arc::default()));
        let all: Vec<QueuePlace> = (0..4).map(|_| queue.place(Tenant::default()).unwrap()).collect();
        assert!(queue.place(Tenant::default()).is_err());
        drop(all);
    }
}

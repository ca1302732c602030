//! The memory of requests: counted before it is taken, admitted in turn, and returned to the system.
//!
//! ```text
//! bodies -> understood (JSON, text, tokens) -> the engine, which keeps its own count
//!                                           -> outgoing (captured rows, logprobs), until the client has it
//! ```
//! Each of the three has a [`ByteBudget`]. A request holds bytes of a budget while it uses them, and waits only for the
//! next budget.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::error::ApiError;
use crate::load::LEAST_BYTES;
use crate::machine::topology;

type Result<T> = std::result::Result<T, ApiError>;

/// How long a request waits for memory that other requests hold.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long a reading of the free memory stays valid. Bytes admitted since then are counted as well.
const FRESH: Duration = Duration::from_millis(20);

/// How often waiting requests check for memory freed outside of this process.
const LOOK: Duration = Duration::from_millis(100);

/// Requests up to this size do not wait behind larger ones, and may use the last quarter.
const SMALL_BYTES: u64 = 1 << 20;

/// Memory of at least this size is returned to the system when it is freed.
const LARGE_BYTES: u64 = 16 << 20;

/// The budgets of a server.
pub(super) struct RequestMemory {
    /// Bodies as they arrive.
    pub(super) bodies: Arc<ByteBudget>,
    /// Parsed bodies, until the engine has the request.
    pub(super) understood: Arc<ByteBudget>,
    /// Answers besides text, until the client has them: captured rows, logprobs.
    pub(super) outgoing: Arc<ByteBudget>,
}

impl Default for RequestMemory {
    fn default() -> Self {
        // Together three quarters, so that some memory stays free even before admitted bytes are used.
        let budget = |eighths| Arc::new(ByteBudget::new(eighths, topology::available_bytes));
        Self { bodies: budget(1), understood: budget(3), outgoing: budget(2) }
    }
}

/// Bytes that requests may hold together: a share of the free memory, which shrinks as they use it.
pub(super) struct ByteBudget {
    eighths: u64,
    available: fn() -> u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    held: u64,
    by_client: HashMap<u64, u64>,
    line: Vec<Waiting>,
    read: Option<(Instant, u64)>, // when free memory was last read, and how much it was
}

struct Waiting {
    client: u64,
    bytes: u64,
    admitted: oneshot::Sender<Reservation>,
}

/// Bytes of a budget, held until dropped.
pub(super) struct Reservation {
    budget: Arc<ByteBudget>,
    client: u64,
    bytes: u64,
}

impl ByteBudget {
    fn new(eighths: u64, available: fn() -> u64) -> Self {
        Self { eighths, available, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `client` may hold `bytes`. While others wait, no client gets more than half.
    ///
    /// Errors: the budget never has that much, or not in time.
    pub(super) async fn admit(self: &Arc<Self>, client: u64, bytes: u64) -> Result<Reservation> {
        let mut turn = self.stand_in_line(client, bytes)?;
        let until = tokio::time::Instant::now() + PATIENCE;
        self.advance();
        loop {
            let look = tokio::time::Instant::now() + LOOK;
            match tokio::time::timeout_at(look.min(until), &mut turn).await {
                Ok(Ok(held)) => return Ok(held),
                Ok(Err(_)) => return Err(ApiError::internal()),
                Err(_) if look < until => self.look(),
                Err(_) => {
                    return Err(ApiError::too_many(
                        "Other requests hold the memory that this request needs: try again later",
                    ));
                }
            }
        }
    }

    fn stand_in_line(&self, client: u64, bytes: u64) -> Result<oneshot::Receiver<Reservation>> {
        let mut state = self.lock();
        let free = state.free(self.available);
        let most = self.room(free + state.held, bytes);
        if bytes > most {
            let (needed, most) = (bytes.div_ceil(1 << 20), most >> 20);
            let message = format!(
                "This request takes up to {needed} MiB of memory and {most} are free for it: ask for less, or try \
                 again later"
            );
            return Err(ApiError::unavailable(&message, Some(30)));
        }
        let (admitted, turn) = oneshot::channel();
        state.line.push(Waiting { client, bytes, admitted });
        Ok(turn)
    }

    /// Bytes that all requests may hold when `free` bytes are free, for a request of `bytes`.
    fn room(&self, free: u64, bytes: u64) -> u64 {
        let room = free.saturating_sub(LEAST_BYTES) / 8 * self.eighths;
        if bytes <= SMALL_BYTES { room } else { room - room / 4 }
    }

    /// Admits waiting requests after a while without changes; once for all of them.
    fn look(self: &Arc<Self>) {
        if self.lock().read.is_none_or(|(at, _)| at.elapsed() >= FRESH) {
            self.advance();
        }
    }

    /// Admits waiting requests in order.
    fn advance(self: &Arc<Self>) {
        let mut state = self.lock();
        let free = if state.line.is_empty() { 0 } else { state.free(self.available) };
        let State { held, by_client, line, .. } = &mut *state;
        line.retain(|waiting| !waiting.admitted.is_closed());
        let several = line.iter().any(|waiting| waiting.client != line[0].client);
        let mut blocked = false; // by a large one that waits for memory
        let mut next = Vec::new();
        for Waiting { client, bytes, admitted } in std::mem::take(line) {
            let room = self.room(free, bytes);
            let own = by_client.get(&client).copied().unwrap_or(0);
            // A client that holds nothing is never over its share: it could not make do with half.
            let greedy = several && own > 0 && own + bytes > room / 2;
            let small = bytes <= SMALL_BYTES;
            if greedy || (blocked && !small) || *held + bytes > room {
                blocked |= !greedy && !small;
                line.push(Waiting { client, bytes, admitted });
                continue;
            }
            *held += bytes;
            *by_client.entry(client).or_default() += bytes;
            next.push((admitted, Reservation { budget: self.clone(), client, bytes }));
        }
        drop(state);
        for (admitted, held) in next {
            // If the waiter has gone meanwhile, its bytes are dropped here.
            let _ = admitted.send(held);
        }
    }
}

impl State {
    /// Free bytes. Held bytes may not be in use yet.
    fn free(&mut self, available: fn() -> u64) -> u64 {
        match self.read {
            Some((at, free)) if at.elapsed() < FRESH => free,
            _ => self.read.insert((Instant::now(), available())).1,
        }
    }
}

impl Reservation {
    /// Waits for more of the same.
    pub(super) async fn grow(&mut self, bytes: u64) -> Result<()> {
        let mut more = self.budget.admit(self.client, bytes).await?;
        self.bytes += std::mem::take(&mut more.bytes);
        Ok(())
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.held -= self.bytes;
        if let Some(own) = state.by_client.get_mut(&self.client) {
            *own -= self.bytes;
            if *own == 0 {
                state.by_client.remove(&self.client);
            }
        }
        drop(state);
        self.budget.advance();
    }
}

/// Returns freed memory that `held` counted to the system, which the allocator would keep. Too slow for an async
/// thread.
pub(super) fn give_back(held: Reservation) {
    if held.bytes >= LARGE_BYTES {
        crate::machine::memory::trim();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// 800 MiB may be held, of which those that take more than a MiB get 600.
    fn budget() -> Arc<ByteBudget> {
        Arc::new(ByteBudget::new(8, || LEAST_BYTES + 800 * MIB))
    }

    /// What comes of asking, once all tasks had time to run.
    async fn settled(asked: &tokio::task::JoinHandle<Result<Reservation>>) -> bool {
        tokio::time::sleep(Duration::from_millis(30)).await;
        asked.is_finished()
    }

    fn ask(budget: &Arc<ByteBudget>, client: u64, mib: u64) -> tokio::task::JoinHandle<Result<Reservation>> {
        let budget = budget.clone();
        tokio::spawn(async move { budget.admit(client, mib * MIB).await })
    }

    #[tokio::test]
    async fn what_is_held_is_given_to_the_first_who_waits() {
        let budget = budget();
        let first = budget.admit(1, 500 * MIB).await.unwrap();
        let (second, third) = (ask(&budget, 1, 400), ask(&budget, 1, 50));
        assert!(!settled(&second).await && !third.is_finished(), "no request passes a large one that waits");
        let small = budget.admit(2, MIB).await.unwrap();
        drop(first);
        assert!(settled(&second).await && third.is_finished());
        drop((small, second.await.unwrap(), third.await.unwrap()));
        let state = budget.lock();
        assert!(state.held == 0 && state.by_client.is_empty());
    }

    #[tokio::test]
    async fn nobody_gets_more_than_half_while_others_wait() {
        let budget = budget();
        let _first = budget.admit(1, 300 * MIB).await.unwrap();
        let second = budget.admit(3, 250 * MIB).await.unwrap();
        let greedy = ask(&budget, 1, 200);
        assert!(!settled(&greedy).await);
        let other = ask(&budget, 2, 200);
        assert!(!settled(&other).await);
        drop(second);
        assert!(settled(&other).await && !greedy.is_finished(), "it came first, and would have more than half");
        drop(other.await.unwrap());
        assert!(settled(&greedy).await, "no other request waits");
    }

    #[tokio::test]
    async fn what_can_never_be_is_refused_at_once() {
        let budget = budget();
        let refusal = budget.admit(1, 601 * MIB).await.err().unwrap().to_json().to_string();
        assert!(refusal.contains("601 MiB") && refusal.contains("600 are free"), "{refusal}");
        let none = Arc::new(ByteBudget::new(8, || LEAST_BYTES / 2));
        assert!(none.admit(1, 1).await.is_err());
    }

    #[tokio::test]
    async fn who_goes_away_holds_nobody_up() {
        let budget = budget();
        let first = budget.admit(1, 500 * MIB).await.unwrap();
        let (gone, next) = (ask(&budget, 1, 400), ask(&budget, 1, 90));
        assert!(!settled(&next).await);
        gone.abort();
        for _ in 0..100 {
            if next.is_finished() {
                return drop(first);
            }
            tokio::time::sleep(LOOK).await;
        }
        panic!("the next request still waits for one that has gone");
    }

    #[tokio::test]
    async fn what_arrives_without_a_length_holds_what_has_come() {
        let budget = budget();
        let mut held = budget.admit(1, 10).await.unwrap();
        held.grow(20).await.unwrap();
        assert_eq!(held.bytes(), 30);
        assert_eq!(budget.lock().held, 30);
        drop(held);
        assert_eq!(budget.lock().held, 0);
    }
}

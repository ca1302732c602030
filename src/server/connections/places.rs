//! Places for connections, and which connection is closed when all are taken.
//!
//! ```text
//! new connection:  a place is free          takes it
//!                  `victim` names one       closes that connection and takes its place
//!                  all are being answered   takes a reserve place, which answers only /health, /ready and /metrics
//! the victim:      never a connection that waits for the server, only one that the server waits for
//!                  of the network with more than half of the places, if there is one; it takes no other's place
//!                  first the one idle longest between two requests
//!                  then the one waited for longest: to send a head or a body, to read an answer
//! ```

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

/// Bytes per second of a body or an answer below which the server counts as waiting.
pub(super) const LEAST_RATE: u32 = 1 << 10;

/// Reserve places besides the regular ones.
pub(super) const RESERVE: usize = 64;

/// Time of a handshake and a head on a slow line. Without it new connections would lose to bodies that trickle at
/// `LEAST_RATE`.
const HEAD_TIME: Duration = Duration::from_millis(250);

/// What a connection is busy with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Activity {
    /// Nothing, between two requests.
    Idle,
    /// A handshake, or the head of a request.
    Head,
    /// A request's body.
    Body,
    /// An answer.
    Answer,
    /// An answer's last bytes.
    LastBytes,
}

/// A connection, as far as its place is concerned.
#[derive(Clone, Copy, Debug)]
struct Connection {
    network: IpAddr,
    activity: Activity,
    since: Option<Instant>, // the client lets us wait; what it moves at `LEAST_RATE` is no wait
}

/// Connections by number, and what ends each when it is dropped.
type Pool = BTreeMap<u64, (Connection, oneshot::Sender<()>)>;

/// All places of a server.
pub(in crate::server) struct ConnectionPlaces {
    size: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next: u64,
    pools: [Pool; 2], // regular, reserve
    ended: u64,       // connections whose place went to others
}

/// The place of one connection; free when it is dropped.
pub(super) struct ConnectionPlace {
    places: Arc<ConnectionPlaces>,
    pool: usize,
    id: u64,
}

impl ConnectionPlaces {
    /// `size` regular ones.
    pub(in crate::server) fn new(size: usize) -> Self {
        Self { size, table: Mutex::default() }
    }

    /// Connections with places, and how many were closed in favour of others.
    pub(in crate::server) fn count(&self) -> (usize, u64) {
        let table = self.lock();
        (table.pools.iter().map(Pool::len).sum(), table.ended)
    }

    /// Whether the next connection needs the place of another.
    pub(super) fn are_taken(&self) -> bool {
        self.lock().pools[0].len() >= self.size
    }

    /// A place for a client of this address, and a future that ends when it loses the place. `None`: even the reserve
    /// is full.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> Option<(ConnectionPlace, oneshot::Receiver<()>)> {
        let network = network(address);
        let mut table = self.lock();
        let sizes = [self.size, RESERVE];
        let pool = (0..2).find(|&pool| table.pools[pool].len() < sizes[pool] || table.end_one(pool, network))?;
        let (end, ended) = oneshot::channel();
        let id = table.next;
        table.next += 1;
        let since = Some(Instant::now() + HEAD_TIME);
        table.pools[pool].insert(id, (Connection { network, activity: Activity::Head, since }, end));
        Some((ConnectionPlace { places: self.clone(), pool, id }, ended))
    }

    /// Closes any connection that the server waits for, because file handles have run out.
    pub(super) fn make_room(&self) {
        let no_address = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        self.lock().end_one(0, no_address);
    }

    /// Closes all connections that are busy with one of these.
    pub(super) fn end(&self, activities: &[Activity]) {
        for pool in &mut self.lock().pools {
            pool.retain(|_, (connection, _)| !activities.contains(&connection.activity));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Closes one connection for a new one of `network`. Returns whether there was one to close.
    fn end_one(&mut self, pool: usize, network: IpAddr) -> bool {
        let connections = self.pools[pool].iter().map(|(&id, (connection, _))| (id, *connection));
        let victim = victim(connections, network);
        self.ended += u64::from(victim.is_some());
        victim.is_some_and(|id| self.pools[pool].remove(&id).is_some())
    }
}

impl ConnectionPlace {
    /// Whether another connection wants it as soon as it is idle.
    pub(super) fn is_wanted(&self) -> bool {
        self.pool == 1 || self.places.are_taken()
    }

    pub(super) fn is_reserve(&self) -> bool {
        self.pool == 1
    }

    /// A request's head has arrived. Returns false if the place is already lost.
    pub(super) fn begins(&self, has_body: bool) -> bool {
        self.update(|connection| {
            connection.activity = if has_body { Activity::Body } else { Activity::Answer };
            // Its first bytes may still be on their way: it would lose to heads, which are given that time.
            connection.since = has_body.then(|| Instant::now() + HEAD_TIME);
        })
    }

    /// Bytes have arrived.
    pub(super) fn hears(&self) {
        self.update_if(&[Activity::Idle], Activity::Head, Some(Instant::now() + HEAD_TIME));
    }

    /// `bytes` bytes of the body have arrived.
    pub(super) fn reads(&self, bytes: usize) {
        self.update(|connection| {
            if connection.activity == Activity::Body {
                let now = Instant::now();
                // From the first bytes on, the time counts that they took.
                let begun = |since: Instant| if since > now { since - HEAD_TIME } else { since };
                connection.since = connection.since.map(|since| now.min(begun(since) + worth(bytes)));
            }
        });
    }

    /// The body has arrived, or is not wanted.
    pub(super) fn has_read(&self) {
        self.update_if(&[Activity::Body], Activity::Answer, None);
    }

    /// The answer is complete; its last bytes are not sent yet.
    pub(super) fn has_answered(&self) {
        self.update_if(&[Activity::Body, Activity::Answer], Activity::LastBytes, None);
    }

    /// Everything has been sent.
    pub(super) fn has_sent(&self) {
        self.update_if(&[Activity::LastBytes], Activity::Idle, Some(Instant::now()));
    }

    /// The client has read nothing of its answer since then, or reads again.
    pub(super) fn stalls(&self, since: Option<Instant>) {
        self.update(|connection| {
            if matches!(connection.activity, Activity::Answer | Activity::LastBytes) {
                connection.since = since;
            }
        });
    }

    fn update_if(&self, before: &[Activity], activity: Activity, since: Option<Instant>) {
        self.update(|connection| {
            if before.contains(&connection.activity) {
                (connection.activity, connection.since) = (activity, since);
            }
        });
    }

    fn update(&self, change: impl FnOnce(&mut Connection)) -> bool {
        let mut table = self.places.lock();
        table.pools[self.pool].get_mut(&self.id).map(|(connection, _)| change(connection)).is_some()
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.places.lock().pools[self.pool].remove(&self.id);
    }
}

/// How long `bytes` bytes take at the least rate.
pub(super) fn worth(bytes: usize) -> Duration {
    Duration::from_secs(bytes as u64) / LEAST_RATE
}

/// The network of one subscriber: an IPv4 address, or 64 bits of an IPv6 address.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from(u128::from(address) >> 64 << 64)),
        address => address,
    }
}

/// The connection that loses its place to a new one.
fn victim(connections: impl Iterator<Item = (u64, Connection)> + Clone, newcomer: IpAddr) -> Option<u64> {
    let longest = |network: Option<IpAddr>| {
        let candidates = connections.clone().filter(|(_, c)| network.is_none_or(|network| c.network == network));
        let waits = candidates.filter_map(|(id, c)| Some((c.activity != Activity::Idle, c.since?, id)));
        waits.min().map(|(_, _, id)| id)
    };
    match majority(connections.clone().map(|(_, c)| c.network)) {
        None => longest(None),
        Some(crowd) if crowd == newcomer => longest(Some(crowd)),
        Some(crowd) => longest(Some(crowd)).or_else(|| longest(None)),
    }
}

/// The value that makes up more than half of all, if there is one.
fn majority<T: PartialEq + Copy>(all: impl Iterator<Item = T> + Clone) -> Option<T> {
    // Boyer and Moore: remove pairs of different values; only what is left can be more than half.
    let (mut left, mut more) = (None, 0);
    for one in all.clone() {
        match more {
            0 => (left, more) = (Some(one), 1),
            _ if left == Some(one) => more += 1,
            _ => more -= 1,
        }
    }
    left.filter(|&left| 2 * all.clone().filter(|&one| one == left).count() > all.count())
}

#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use proptest::prelude::*;

use super::*;

fn host(n: u8) -> IpAddr {
    Ipv4Addr::new(192, 0, 2, n).into()
}

/// Connections of few networks: what each is busy with, and for how many seconds it has let us wait, if it does.
fn tables() -> impl Strategy<Value = Vec<Connection>> {
    let activity = prop_oneof![
        Just(Activity::Idle),
        Just(Activity::Head),
        Just(Activity::Body),
        Just(Activity::Answer),
        Just(Activity::Answer),
        Just(Activity::LastBytes)
    ];
    let now = Instant::now() + Duration::from_secs(1000);
    let one = (0..4u8, activity, 0..100u64, any::<bool>()).prop_map(move |(network, activity, waited, stalled)| {
        let works = matches!(activity, Activity::Answer | Activity::LastBytes) && !stalled;
        Connection { network: host(network), activity, since: (!works).then(|| now - Duration::from_secs(waited)) }
    });
    prop::collection::vec(one, 1..40)
}

fn chosen(table: &[Connection], newcomer: IpAddr) -> Option<Connection> {
    victim(table.iter().enumerate().map(|(id, &c)| (id as u64, c)), newcomer).map(|id| table[id as usize])
}

proptest! {
    #[test]
    fn the_victim_is_the_one_the_rules_name(table in tables(), newcomer in 0..5u8) {
        let newcomer = host(newcomer);
        let held = |network: IpAddr| table.iter().filter(|c| c.network == network).count();
        let crowd = table.iter().map(|c| c.network).find(|&network| 2 * held(network) > table.len());
        let waits = |network: Option<IpAddr>| table.iter().filter(move |c| c.since.is_some() && network.is_none_or(
            |n| n == c.network));
        let Some(victim) = chosen(&table, newcomer) else {
            // Only where all connections wait for us, or all of the crowd and the newcomer is one of them.
            prop_assert_eq!(waits(crowd.filter(|&crowd| crowd == newcomer)).count(), 0);
            return Ok(());
        };
        prop_assert!(victim.since.is_some(), "one whom we work for");
        if let Some(crowd) = crowd && waits(Some(crowd)).count() > 0 {
            prop_assert_eq!(victim.network, crowd);
        }
        if crowd == Some(newcomer) {
            prop_assert_eq!(victim.network, newcomer, "the crowd takes the place of one who has no more than a share");
        }
        let alike: Vec<_> = waits(crowd.filter(|&crowd| crowd == victim.network)).collect();
        match victim.activity {
            Activity::Idle => {
                let idle = alike.iter().filter(|c| c.activity == Activity::Idle);
                prop_assert!(idle.clone().all(|c| c.since >= victim.since), "not the idlest");
            }
            _ => {
                prop_assert!(alike.iter().all(|c| c.activity != Activity::Idle), "an idle one stays");
                prop_assert!(alike.iter().all(|c| c.since >= victim.since), "not whom we have waited for longest");
            }
        }
    }

    #[test]
    fn a_majority_is_more_than_half(all in prop::collection::vec(0..3u8, 0..20)) {
        let more = (0..3).find(|one| 2 * all.iter().filter(|other| *other == one).count() > all.len());
        prop_assert_eq!(majority(all.iter().copied()), more);
    }
}

/// A client as the tests see it.
struct Client {
    place: ConnectionPlace,
    ended: oneshot::Receiver<()>,
}

impl Client {
    fn enter(places: &Arc<ConnectionPlaces>, address: IpAddr) -> Self {
        let (place, ended) = places.enter(address).unwrap();
        Self { place, ended }
    }

    fn has_ended(&mut self) -> bool {
        self.ended.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    /// Asks and is answered whole.
    fn asks(&self) {
        self.place.hears();
        assert!(self.place.begins(false));
        self.place.has_answered();
        self.place.has_sent();
    }
}

#[test]
fn the_idlest_goes_first_and_who_is_answered_never() {
    let places = Arc::new(ConnectionPlaces::new(3));
    let [mut working, mut idle, mut idlest] = [1, 2, 3].map(|n| Client::enter(&places, host(n)));
    assert!(places.are_taken());
    idlest.asks();
    idle.asks();
    working.place.begins(true);
    working.place.has_read();
    let newcomer = Client::enter(&places, host(4));
    assert!(idlest.has_ended() && !idle.has_ended() && !working.has_ended());
    assert!(!idlest.place.begins(false), "a place that is gone begins nothing");
    newcomer.place.begins(false);
    let second = Client::enter(&places, host(5));
    assert!(idle.has_ended() && !working.has_ended());
    second.place.begins(false);
    // All three are answered.
    let reserve = Client::enter(&places, host(6));
    assert!(reserve.place.is_reserve() && !second.place.is_reserve());
    assert_eq!(places.count(), (4, 2));
    drop(working);
    assert!(!Client::enter(&places, host(7)).place.is_reserve(), "a place that was left is free");
}

#[test]
fn the_reserve_is_finite_and_gives_way_too() {
    let places = Arc::new(ConnectionPlaces::new(1));
    let working = Client::enter(&places, host(1));
    working.place.begins(false);
    let mut reserve: Vec<Client> = (0..RESERVE).map(|i| Client::enter(&places, host(i as u8))).collect();
    let newest = Client::enter(&places, host(200));
    assert!(newest.place.is_reserve() && reserve[0].has_ended() && !reserve[1].has_ended());
    reserve.iter().chain([&newest]).for_each(|client| _ = client.place.begins(false));
    assert!(places.enter(host(1)).is_none(), "all of the reserve is answered");
    places.end(&[Activity::Answer]);
    assert_eq!(places.count().0, 0);
}

#[test]
fn a_crowd_gives_way_to_others_and_takes_nobody_elses_place() {
    let places = Arc::new(ConnectionPlaces::new(4));
    let mut other = Client::enter(&places, host(9));
    other.asks();
    let mut crowd: Vec<Client> = (0..3).map(|_| Client::enter(&places, host(1))).collect();
    let newcomer = Client::enter(&places, host(2));
    assert!(crowd[0].has_ended() && !other.has_ended(), "the crowd gives way although another is idle");
    drop(newcomer);
    crowd[0] = Client::enter(&places, host(1));
    crowd.iter().for_each(|client| _ = client.place.begins(false));
    assert!(Client::enter(&places, host(1)).place.is_reserve() && !other.has_ended());
    assert!(
        !Client::enter(&places, host(2)).place.is_reserve() && other.has_ended(),
        "the crowd is answered; others may take turns"
    );
}

/// Head and body of a request may come apart, while others connect again and again.
#[test]
fn a_body_on_its_way_does_not_lose_to_heads() {
    let places = Arc::new(ConnectionPlaces::new(2));
    let [mut asking, mut silent] = [1, 2].map(|n| Client::enter(&places, host(n)));
    asking.place.begins(true);
    let mut another = Client::enter(&places, host(3));
    assert!(silent.has_ended() && !asking.has_ended());
    asking.place.reads(100);
    asking.place.has_read();
    Client::enter(&places, host(4));
    assert!(another.has_ended() && !asking.has_ended());
}

#[test]
fn a_body_that_comes_is_no_wait_and_one_that_trickles_is() {
    let places = Arc::new(ConnectionPlaces::new(2));
    let [mut slow, mut quick] = [1, 2].map(|n| Client::enter(&places, host(n)));
    for client in [&quick, &slow] {
        client.place.begins(true); // the quick one first: by its age it would go
    }
    std::thread::sleep(Duration::from_millis(50));
    quick.place.reads(1 << 20);
    slow.place.reads(1);
    let newcomer = Client::enter(&places, host(3));
    assert!(slow.has_ended() && !quick.has_ended());
    // A body goes before one that has just come, and what it sent at once buys nothing for later.
    Client::enter(&places, host(4));
    assert!(quick.has_ended());
    drop(newcomer);
}

#[test]
fn an_answer_that_is_not_taken_is_a_wait() {
    let places = Arc::new(ConnectionPlaces::new(1));
    let mut client = Client::enter(&places, host(1));
    client.place.begins(false);
    client.place.stalls(Some(Instant::now()));
    client.place.stalls(None);
    assert!(Client::enter(&places, host(2)).place.is_reserve(), "it takes its answer again");
    client.place.has_answered();
    assert!(Client::enter(&places, host(2)).place.is_reserve(), "its last bytes are on their way");
    client.place.stalls(Some(Instant::now()));
    assert!(!Client::enter(&places, host(2)).place.is_reserve() && client.has_ended());
}

#[test]
fn a_subscriber_is_one_whatever_its_addresses() {
    let same = |a: &str, b: &str| network(a.parse().unwrap()) == network(b.parse().unwrap());
    assert!(same("2001:db8::1", "2001:db8::ffff:1") && !same("2001:db8::1", "2001:db8:0:1::1"));
    assert!(same("::ffff:192.0.2.1", "192.0.2.1") && !same("192.0.2.1", "192.0.2.2"));
}

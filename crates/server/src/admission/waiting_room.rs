//! The waiting room: accepted connections that wait for a place.
//!
//! The kernel's queue has one order for all clients, so a client that opens thousands of
//! connections makes all other clients wait behind its connections. Here networks take turns (fair
//! queueing, RFC 970). The newest connection of a network is first, because in a flood the clients
//! of the oldest connections have most likely given up. When the room is full, the loop closes the
//! oldest connection of the network with the most connections.

use crate::admission::network::{Network, NetworkPermit};
use crate::admission::placement::Placed;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::collections::{HashMap, VecDeque};

/// The number of networks that are asked at a time. Only a network with many connections may be
/// refused a place that other networks get ([`crate::admission::eviction::reserved_places`]), and
/// there are few such networks.
const ASKED_MAX: usize = 32;

/// The connections of an event loop that wait for a place.
#[derive(Debug, Default)]
pub(crate) struct WaitingRoom {
    /// The connections of each network, oldest first. A network without connections is not in the
    /// map. All Unix sockets are one network.
    queues: HashMap<Option<Network>, VecDeque<Waiting>>,
    /// The networks with connections, in the order of their turns.
    turns: VecDeque<Option<Network>>,
    len: usize,
}

/// A connection that waits for a place.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub placed: Placed,
    pub permit: Option<NetworkPermit>,
}

impl Waiting {
    /// Whether the client is gone and sent nothing.
    pub fn has_ended(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match recv(&self.placed.accepted.socket, &mut [0], flags) {
            Ok((_, count)) => count == 0,
            Err(errno) => errno != Errno::AGAIN && errno != Errno::INTR,
        }
    }
}

impl WaitingRoom {
    /// The number of connections.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a connection of a network.
    pub fn push(&mut self, network: Option<Network>, waiting: Waiting) {
        let queue = self.queues.entry(network).or_default();
        if queue.is_empty() {
            self.turns.push_back(network);
        }
        queue.push_back(waiting);
        self.len += 1;
    }

    /// Takes the newest connection of the next network that has a place, and the place.
    pub fn next<P>(
        &mut self,
        mut place: impl FnMut(Option<Network>) -> Option<P>,
    ) -> Option<(Option<Network>, Waiting, P)> {
        let mut asked = self.turns.iter().take(ASKED_MAX).enumerate();
        let (turn, place) = asked.find_map(|(turn, network)| Some((turn, place(*network)?)))?;
        let network = self.turns.remove(turn)?;
        let queue = self.queues.get_mut(&network)?;
        let waiting = queue.pop_back()?;
        if queue.is_empty() {
            self.queues.remove(&network);
        } else {
            self.turns.push_back(network);
        }
        self.len -= 1;
        Some((network, waiting, place))
    }

    /// Whether [`WaitingRoom::shed`] would close a connection, because a network has two
    /// connections.
    pub fn can_shed(&self) -> bool {
        self.len > self.queues.len()
    }

    /// Closes the oldest connection of the network with the most waiting connections. Returns false
    /// if no network has more than one waiting connection.
    pub fn shed(&mut self) -> bool {
        if !self.can_shed() {
            return false;
        }
        let Some(queue) = self.queues.values_mut().max_by_key(|queue| queue.len()) else {
            return false;
        };
        // The connection at the front is not the last of the queue.
        let is_shed = queue.pop_front().is_some();
        self.len -= usize::from(is_shed);
        is_shed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::Accepted;
    use std::io::Write;
    use std::net::{IpAddr, Ipv4Addr, SocketAddr};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    fn network(host: u8) -> Network {
        Network::from(IpAddr::from(Ipv4Addr::new(192, 0, 2, host)))
    }

    /// A connection from a port by which the test knows it.
    fn push(room: &mut WaitingRoom, host: u8, port: u16) {
        let peer = SocketAddr::from(([192, 0, 2, host], port));
        let socket = OwnedFd::from(UnixStream::pair().unwrap().0);
        let placed = Placed { accepted: Accepted::new(socket, Some(peer)), place: None };
        room.push(Some(network(host)), Waiting { placed, permit: None });
    }

    fn next(room: &mut WaitingRoom, has_place: impl Fn(Option<Network>) -> bool) -> Option<u16> {
        let next = room.next(|network| has_place(network).then_some(()));
        next.map(|(_, waiting, ())| waiting.placed.accepted.peer.unwrap().port())
    }

    #[test]
    fn networks_take_turns_and_the_newest_of_each_is_first() {
        let mut room = WaitingRoom::default();
        for port in 0..4 {
            push(&mut room, 1, port);
        }
        push(&mut room, 2, 20);
        push(&mut room, 3, 30);
        let order: Vec<_> = std::iter::from_fn(|| next(&mut room, |_| true)).collect();
        assert_eq!(order, [3, 20, 30, 2, 1, 0]);
        assert!(room.is_empty() && room.queues.is_empty() && room.turns.is_empty());
    }

    #[test]
    fn a_network_without_a_place_keeps_its_turn() {
        let mut room = WaitingRoom::default();
        push(&mut room, 1, 10);
        push(&mut room, 2, 20);
        push(&mut room, 2, 21);
        let is_second = |other| other == Some(network(2));
        assert_eq!(next(&mut room, is_second), Some(21));
        assert_eq!(next(&mut room, is_second), Some(20));
        assert_eq!(next(&mut room, is_second), None);
        assert_eq!((next(&mut room, |_| true), room.len()), (Some(10), 0));
    }

    #[test]
    fn the_oldest_of_the_largest_network_is_shed() {
        let mut room = WaitingRoom::default();
        for port in 0..3 {
            push(&mut room, 1, port);
        }
        push(&mut room, 2, 20);
        assert!(room.can_shed() && room.shed());
        assert_eq!(next(&mut room, |_| true), Some(2), "the newest is there");
        assert_eq!((room.len(), room.can_shed(), room.shed()), (2, false, false));
        // Networks of the same size lose one each, down to their last.
        for host in 1..=9 {
            push(&mut room, host, u16::from(host));
        }
        assert!(room.shed() && room.shed());
        assert_eq!((room.len(), room.shed()), (9, false));
    }

    #[test]
    fn a_client_that_has_gone_without_a_word_has_ended() {
        let waiting = || {
            let (client, socket) = UnixStream::pair().unwrap();
            let placed = Placed { accepted: Accepted::new(socket.into(), None), place: None };
            (client, Waiting { placed, permit: None })
        };
        let (client, silent) = waiting();
        assert!(!silent.has_ended());
        drop(client);
        assert!(silent.has_ended());
        let (mut client, half_closed) = waiting();
        client.write_all(b"GET").unwrap();
        drop(client);
        assert!(!half_closed.has_ended(), "its request is there");
    }
}

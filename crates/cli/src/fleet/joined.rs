//! Joins the ranks of a job: each rank finds the others, and the first rank of each host connects
//! to rank 0.

use crate::output::Failure;
use crate::transfer::STREAM_CODE;
use crate::transfer::text::printable;
use haul_fleet::{Announcement, Fleet};
use haul_transfer::{ControlListener, ControlStreams, RankKey};
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

/// The time for all ranks to connect to rank 0, after all ranks announced their addresses.
pub const CONNECT_TIME_MAX: Duration = Duration::from_secs(60);

/// The most letters of a reason: a line of a launcher holds 1,024 bytes.
const REASON_LETTERS_MAX: usize = 800;

/// What this rank is.
pub enum Joined {
    /// Rank 0, where the other ranks connect.
    Zero {
        /// What each rank announced.
        ranks: Vec<Announcement>,
        /// The first ranks of the other hosts.
        members: Vec<usize>,
        /// Where these ranks connect.
        listener: ControlListener,
    },
    /// The first rank of another host.
    Other {
        /// The number of the rank.
        rank: u32,
        /// The connections to rank 0.
        streams: ControlStreams,
    },
    /// Another rank of a host, which has nothing to do.
    Nothing,
}

/// Joins the ranks of the job of this process. Rank 0 listens at one of these ports.
pub fn join(ports: RangeInclusive<u16>, is_insecure: bool) -> Result<Joined, Failure> {
    let fleet = Fleet::from_environment().map_err(Failure::bad_input)?;
    let rank = fleet.rank;
    let key = RankKey::new().map_err(|error| in_rank(rank, error))?;
    let listener = (rank == 0).then(|| ControlListener::bind(key.clone(), ports));
    let listener = listener.transpose().map_err(|error| in_rank(rank, error))?;
    let port = listener.as_ref().map_or(0, ControlListener::port);
    let own = Announcement::new(port, key.public().to_vec());
    let ranks = haul_fleet::exchange(&fleet, &own, is_insecure, &notice_of(rank));
    let ranks = ranks.map_err(|error| in_rank(rank, error))?;
    let mut members = haul_fleet::first_ranks(&ranks);
    if let Some(listener) = listener {
        // The host of rank 0 comes first.
        members.remove(0);
        return Ok(Joined::Zero { ranks, members, listener });
    }
    if !members.contains(&(rank as usize)) {
        return Ok(Joined::Nothing);
    }
    let Announcement { addresses, port, key: public, .. } = &ranks[0];
    let streams =
        haul_transfer::connect_to_rank_0(addresses, *port, &key, public, CONNECT_TIME_MAX);
    let streams = streams.map_err(|error| in_rank(rank, error))?;
    Ok(Joined::Other { rank, streams })
}

/// Returns a function that prints a notice of a rank on standard error.
pub fn notice_of(rank: u32) -> impl Fn(&str) {
    let host = haul_version::host_name();
    // The text may be another rank's.
    move |text| eprintln!("haul: rank {rank} ({host}) {}", printable(text))
}

/// The failure of a rank, with the host. Lines of several ranks may be mixed.
pub fn in_rank(rank: u32, error: impl Display) -> Failure {
    let host = haul_version::host_name();
    // The text may be another rank's.
    let error: String = printable(&error.to_string()).chars().take(REASON_LETTERS_MAX).collect();
    Failure::with_code(format!("rank {rank} ({host}): {error}"), STREAM_CODE)
}

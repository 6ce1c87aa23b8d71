//! Which process of a job this process is, and who the others are.
//!
//! A launcher (Slurm, Open MPI, Hydra, torchrun, Kubernetes, or a user by hand) starts the ranks of
//! a job on several hosts. [`Fleet::from_variables`] reads the rank, the number of ranks and the
//! meeting place from the environment variables of the launcher. [`exchange`] then sends the
//! [`Announcement`] of each rank to all ranks.
//!
//! The announcements go through PMI-1 ([`pmi`]) under `srun --mpi=pmi2` and Hydra
//! (`mpiexec.hydra` of MPICH), and through PMIx under `mpirun` of Open MPI and `srun --mpi=pmix`.
//! Elsewhere the ranks meet at one address, and recognize each other by
//! munge or by a token ([`Vouch`]).

#![forbid(unsafe_code)]

mod announcement;
mod environment;
mod error;
mod launcher;
mod meeting;
mod node_list;
pub mod pmi;
mod vouch;
pub mod wire;

pub use announcement::Announcement;
pub use environment::{Fleet, Rendezvous, Token};
pub use error::Error;
pub use launcher::Launcher;
pub use meeting::Hello;
pub use node_list::{NAMES_MAX, NodeListError, expand};
pub use vouch::Vouch;

use std::time::Duration;

/// The time for all ranks to come, as under PMI-1.
const PMIX_TIME_MAX: Duration = Duration::from_secs(300);

/// Sends the announcement of this rank to all ranks of the fleet. Returns the announcements of all
/// ranks, in the order of the ranks.
///
/// All ranks must call this once, and the call waits for the last rank. At an address, the
/// listening rank reports to `notice` every 5 s which rank is missing, and the first refused ranks.
/// `is_insecure` lets ranks meet that cannot recognize each other.
pub fn exchange(
    fleet: &Fleet,
    own: &Announcement,
    is_insecure: bool,
    notice: &dyn Fn(&str),
) -> Result<Vec<Announcement>, Error> {
    if fleet.size == 1 {
        return Ok(vec![own.clone()]);
    }
    let ranks = announcements(fleet, own, is_insecure, notice)?;
    match ranks.iter().position(|rank| rank.version != own.version) {
        Some(rank) => Err(Error::Announcement { rank: rank as u32 }),
        None => Ok(ranks),
    }
}

/// Exchanges the announcements by the first way that the launcher offers.
fn announcements(
    fleet: &Fleet,
    own: &Announcement,
    is_insecure: bool,
    notice: &dyn Fn(&str),
) -> Result<Vec<Announcement>, Error> {
    if fleet.has_pmix
        && let Some(ranks) = exchange_by_pmix(fleet, own)?
    {
        return Ok(ranks);
    }
    match &fleet.rendezvous {
        Rendezvous::Pmi { descriptor } => exchange_by_pmi(fleet, own, *descriptor),
        Rendezvous::Address { host, port } => {
            let vouch = vouch(fleet, host, is_insecure)?;
            meeting::exchange(fleet, (host, *port), own, &vouch, notice)
        }
        Rendezvous::Unknown => Err(Error::NoRendezvous { launcher: fleet.launcher }),
    }
}

fn exchange_by_pmi(
    fleet: &Fleet,
    own: &Announcement,
    descriptor: i32,
) -> Result<Vec<Announcement>, Error> {
    let stream = haul_sys::descriptors::inherited_socket(descriptor)
        .map_err(|error| Error::PmiDescriptor { descriptor, error })?;
    let mut client = pmi::Client::start(stream)?;
    let all = client.exchange(fleet.rank, fleet.size, &own.encode()?)?;
    client.end()?;
    decode_all(&all)
}

/// `None` without the library of PMIx.
fn exchange_by_pmix(fleet: &Fleet, own: &Announcement) -> Result<Option<Vec<Announcement>>, Error> {
    let own = own.encode()?;
    let all = match haul_pmix::exchange(fleet.rank, fleet.size, &own, PMIX_TIME_MAX) {
        Ok(all) => all,
        Err(haul_pmix::Error::Load(_)) if fleet.rendezvous != Rendezvous::Unknown => {
            return Ok(None);
        }
        Err(error) => return Err(Error::Pmix { launcher: fleet.launcher, error }),
    };
    decode_all(&all).map(Some)
}

fn decode_all(all: &[String]) -> Result<Vec<Announcement>, Error> {
    let decode = |(rank, text): (usize, &String)| Announcement::decode(rank as u32, text);
    all.iter().enumerate().map(decode).collect()
}

/// Who vouches for ranks that meet at an address.
fn vouch(fleet: &Fleet, host: &str, is_insecure: bool) -> Result<Vouch, Error> {
    if let Some(token) = &fleet.token {
        return Vouch::by_token(&token.0);
    }
    if let Some(vouch) = fleet.is_in_slurm.then(Vouch::by_munge).flatten() {
        return Ok(vouch);
    }
    if is_insecure || meeting::is_loopback(host) { Ok(Vouch::Nothing) } else { Err(Error::NoVouch) }
}

/// The first rank of each host, in order.
pub fn first_ranks(ranks: &[Announcement]) -> Vec<usize> {
    let is_first = |&at: &usize| !ranks[..at].iter().any(|other| other.is_same_host(&ranks[at]));
    (0..ranks.len()).filter(is_first).collect()
}

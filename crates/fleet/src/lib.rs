//! Which process of a job this process is, and who the others are.
//!
//! A launcher (Slurm, Open MPI, Hydra, torchrun, Kubernetes, or a user by hand) starts the ranks of
//! a job on several hosts. [`Fleet::from_variables`] reads the rank, the number of ranks and the
//! meeting place from the environment variables of the launcher. [`exchange`] then sends the
//! [`Announcement`] of each rank to all ranks.
//!
//! The announcements go through PMI-1 ([`pmi`]), so two launchers are supported: `srun --mpi=pmi2`
//! and Hydra (`mpiexec.hydra` of MPICH). Under other launchers, [`exchange`] names what is missing.

#![forbid(unsafe_code)]

mod announcement;
mod environment;
mod error;
mod launcher;
mod node_list;
pub mod pmi;

pub use announcement::Announcement;
pub use environment::{Fleet, Rendezvous};
pub use error::Error;
pub use launcher::Launcher;
pub use node_list::{NAMES_MAX, NodeListError, expand};

/// Sends the announcement of this rank to all ranks of the fleet. Returns the announcements of all
/// ranks, in the order of the ranks.
///
/// All ranks must call this once. The call waits for the last rank.
pub fn exchange(fleet: &Fleet, own: &Announcement) -> Result<Vec<Announcement>, Error> {
    let Rendezvous::Pmi { descriptor } = fleet.rendezvous else {
        if fleet.size == 1 {
            return Ok(vec![own.clone()]);
        }
        return Err(Error::NoExchange { launcher: fleet.launcher });
    };
    let stream = haul_sys::descriptors::inherited_socket(descriptor)
        .map_err(|error| Error::PmiDescriptor { descriptor, error })?;
    let mut client = pmi::Client::start(stream)?;
    let all = client.exchange(fleet.rank, fleet.size, &own.encode()?)?;
    client.end()?;
    let decode = |(rank, text): (usize, &String)| Announcement::decode(rank as u32, text);
    all.iter().enumerate().map(decode).collect()
}

/// The first rank of each host, in order.
pub fn first_ranks(ranks: &[Announcement]) -> Vec<usize> {
    let is_first = |&at: &usize| !ranks[..at].iter().any(|other| other.is_same_host(&ranks[at]));
    (0..ranks.len()).filter(is_first).collect()
}

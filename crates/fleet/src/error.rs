//! Errors of this crate. Each is one line with what to do.

use crate::launcher::Launcher;
use std::io;

/// Why the fleet is unknown, or why its ranks cannot meet.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The environment does not name a launcher.
    #[error(
        "haul finds no launcher here: start the ranks with srun, mpirun, mpiexec.hydra or \
         torchrun, or set HAUL_RANK, HAUL_SIZE and HAUL_RENDEZVOUS"
    )]
    NoLauncher,
    /// The process is the batch script or the shell of a Slurm job, and not a task of a step.
    #[error(
        "this process is the script or the shell of Slurm job {job}, and not a task: start haul \
         with srun"
    )]
    NoStep {
        /// SLURM_JOB_ID.
        job: String,
    },
    /// A variable that must come with another variable is missing.
    #[error("{present} is set, but {missing} is not: {cure}")]
    Missing {
        /// The variable that is set.
        present: &'static str,
        /// The variable that is not set.
        missing: &'static str,
        /// What to do.
        cure: &'static str,
    },
    /// A variable has a value that its launcher does not set.
    #[error("{variable}={value}: {problem}")]
    Variable {
        /// The variable.
        variable: &'static str,
        /// The value.
        value: String,
        /// What is wrong.
        problem: String,
    },
    /// The number of the rank does not fit the number of ranks.
    #[error("rank {rank} of {size} ranks ({launcher}) is not possible")]
    Rank {
        /// The rank.
        rank: u32,
        /// The number of ranks.
        size: u32,
        /// The launcher.
        launcher: Launcher,
    },
    /// The launcher names no meeting place.
    #[error(
        "{launcher} does not name a meeting place: set HAUL_RENDEZVOUS=HOST:PORT to the host \
         of rank 0 for all ranks (mpirun -x HAUL_RENDEZVOUS)"
    )]
    NoRendezvous {
        /// The launcher.
        launcher: Launcher,
    },
    /// Nothing vouches for the ranks.
    #[error(
        "the ranks cannot recognize each other: set HAUL_TOKEN to the same secret for all ranks \
         (export HAUL_TOKEN=$(openssl rand -hex 16)), or give --insecure in a network that you \
         trust"
    )]
    NoVouch,
    /// The token could be guessed.
    #[error(
        "HAUL_TOKEN has {bytes} characters, and needs {min}: \
         export HAUL_TOKEN=$(openssl rand -hex 16)"
    )]
    ShortToken {
        /// The characters of the token.
        bytes: usize,
        /// The fewest characters.
        min: usize,
    },
    /// munge does not make a credential.
    #[error("{0}: is munged running on this host?")]
    Munge(String),
    /// The meeting place cannot listen.
    #[error("the ranks cannot meet at port {port} of this host: {error}")]
    Listen {
        /// The port.
        port: u16,
        /// Why the port cannot be used.
        error: io::Error,
    },
    /// This rank cannot join the others at the meeting place.
    #[error("{host} port {port}, where the ranks meet: {problem}")]
    Meet {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// What is wrong.
        problem: String,
    },
    /// Two ranks have one number.
    #[error(
        "there are two ranks {rank}: two fleets meet at one address, so give each its own \
         HAUL_RENDEZVOUS or HAUL_JOB"
    )]
    Twice {
        /// The number.
        rank: u32,
    },
    /// A rank did not come to the meeting place in time.
    #[error("rank {missing} did not come ({came} of {size} ranks came)")]
    Absent {
        /// The first rank that is missing.
        missing: u32,
        /// The number of ranks that came.
        came: usize,
        /// The number of ranks.
        size: u32,
    },
    /// PMI_FD is not a socket of this process.
    #[error(
        "PMI_FD={descriptor}: {error}: the launcher's socket was closed, such as by a shell or a \
         container between the launcher and haul"
    )]
    PmiDescriptor {
        /// The number of the descriptor.
        descriptor: i32,
        /// Why it cannot be used.
        error: io::Error,
    },
    /// The process manager ended or did not answer as PMI-1 requires.
    #[error("the launcher's process manager (PMI): {0}")]
    Pmi(String),
    /// The launcher's PMIx cannot be used.
    #[error(
        "{launcher}: {error}: set HAUL_RENDEZVOUS=HOST:PORT to the host of rank 0 for all ranks \
         (mpirun -x HAUL_RENDEZVOUS), and the ranks meet there"
    )]
    Pmix {
        /// The launcher.
        launcher: Launcher,
        /// What failed.
        error: haul_pmix::Error,
    },
    /// The announcement of a rank is damaged or of another version.
    #[error(
        "rank {rank} sent an announcement that this version of haul does not read: all ranks must \
         start the same haul"
    )]
    Announcement {
        /// The rank.
        rank: u32,
    },
    /// The announcement of this rank is too long for the process manager.
    #[error("this host has more addresses than an announcement can hold ({bytes} of {max} bytes)")]
    TooLong {
        /// The bytes of the announcement.
        bytes: usize,
        /// The most bytes.
        max: usize,
    },
}

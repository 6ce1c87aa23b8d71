//! The launchers that haul recognizes.

use std::fmt;

/// What started the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// The user, by `HAUL_RANK`, `HAUL_SIZE` and `HAUL_RENDEZVOUS`.
    Haul,
    /// torchrun, or a program with its variables.
    Torchrun,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// A process manager that speaks PMI-1: Hydra, or `srun --mpi=pmi2`.
    Pmi,
    /// `srun --mpi=pmix`.
    Pmix,
    /// `srun`.
    Slurm,
    /// An indexed Job of Kubernetes.
    Kubernetes,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Haul => "HAUL_RANK",
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI",
            Self::Pmix => "PMIx",
            Self::Slurm => "Slurm",
            Self::Kubernetes => "Kubernetes",
        })
    }
}

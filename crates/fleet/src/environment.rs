//! The fleet as the environment variables of a launcher describe the fleet.

use crate::error::Error;
use crate::launcher::Launcher;
use crate::node_list::expand;
use std::fmt;

/// The port of the meeting place if no variable names a port.
pub const RENDEZVOUS_PORT: u16 = 4287;
/// The most ranks of a fleet.
const SIZE_MAX: u32 = 1 << 20;

/// The ranks of a job, as one rank sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fleet {
    /// The launcher whose variables count.
    pub launcher: Launcher,
    /// The number of this rank, from 0.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
    /// The number of this rank among the ranks of its host, if the launcher states the number.
    pub local_rank: Option<u32>,
    /// The hosts, in the order of the launcher's list, which is not the order of the ranks. `None`
    /// if the launcher does not list the hosts.
    pub hosts: Option<Vec<String>>,
    /// Identifies the start of the job. Ranks of different starts refuse each other, because
    /// torchrun starts all ranks again after a failure.
    pub job: String,
    /// Where the ranks meet.
    pub rendezvous: Rendezvous,
    /// Whether the launcher exchanges announcements by PMIx. Without the library of PMIx, the ranks
    /// meet at the meeting place.
    pub has_pmix: bool,
    /// Whether this rank listens at the meeting place.
    pub listens: bool,
    /// `HAUL_TOKEN`, by which the ranks recognize each other.
    pub token: Option<Token>,
    /// Whether the process is part of a job of Slurm, whose hosts have munge.
    pub is_in_slurm: bool,
}

/// A secret that all ranks have.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(pub(crate) String);

/// The secret stays out of messages.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Where the ranks meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rendezvous {
    /// The launcher's process manager, through this descriptor (`PMI_FD`).
    Pmi {
        /// The number of the descriptor.
        descriptor: i32,
    },
    /// A host and a port, where rank 0 or the host of rank 0 listens.
    Address {
        /// The name or the address of the host.
        host: String,
        /// The port.
        port: u16,
    },
    /// Nowhere: the launcher does not name a meeting place.
    Unknown,
}

/// Reads one variable; `None` if the variable is not set.
type Variables<'v> = &'v dyn Fn(&str) -> Option<String>;

impl Fleet {
    /// The fleet of this process.
    pub fn from_environment() -> Result<Self, Error> {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    /// The fleet that these variables describe. The variables of the innermost launcher count: an
    /// MPI program inside a job of Slurm is a rank of MPI.
    pub fn from_variables(variables: &dyn Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let variables = &|name: &str| variables(name).filter(|value| !value.is_empty());
        let read = [of_user, of_torchrun, of_open_mpi, of_pmi, of_pmix, of_slurm, of_kubernetes];
        for read in read {
            if let Some(fleet) = read(variables)? {
                let token = variables("HAUL_TOKEN").map(Token);
                let is_in_slurm = variables("SLURM_JOB_ID").is_some();
                return Fleet { token, is_in_slurm, ..fleet }.check();
            }
        }
        match variables("SLURM_JOB_ID") {
            Some(job) => Err(Error::NoStep { job }),
            None => Err(Error::NoLauncher),
        }
    }

    /// Refuses numbers that no launcher sets.
    fn check(self) -> Result<Self, Error> {
        let Self { rank, size, launcher, .. } = self;
        if size == 0 || size > SIZE_MAX || rank >= size {
            return Err(Error::Rank { rank, size, launcher });
        }
        Ok(self)
    }
}

/// A fleet with these ranks, and nothing else.
fn fleet(launcher: Launcher, rank: u32, size: u32) -> Fleet {
    Fleet {
        launcher,
        rank,
        size,
        local_rank: None,
        hosts: None,
        job: String::new(),
        rendezvous: Rendezvous::Unknown,
        has_pmix: false,
        listens: rank == 0,
        token: None,
        is_in_slurm: false,
    }
}

/// Reads a number.
fn number(variables: Variables<'_>, variable: &'static str) -> Result<Option<u32>, Error> {
    let Some(value) = variables(variable) else { return Ok(None) };
    match value.parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(Error::Variable { variable, value, problem: "not a number".into() }),
    }
}

/// Reads a number that must be set because another variable is set.
fn required(
    variables: Variables<'_>,
    present: &'static str,
    missing: &'static str,
    cure: &'static str,
) -> Result<u32, Error> {
    number(variables, missing)?.ok_or(Error::Missing { present, missing, cure })
}

fn of_user(variables: Variables<'_>) -> Result<Option<Fleet>, Error> {
    let Some(rank) = number(variables, "HAUL_RANK")? else { return Ok(None) };
    let cure = "set both, and HAUL_RENDEZVOUS=HOST:PORT";
    let size = required(variables, "HAUL_RANK", "HAUL_SIZE", cure)?;
    let rendezvous = named_address(variables)?.unwrap_or(Rendezvous::Unknown);
    let job = variables("HAUL_JOB").unwrap_or_default();
    Ok(Some(Fleet { job, rendezvous, ..fleet(Launcher::Haul, rank, size) }))
}

fn of_torchrun(variables: Variables<'_>) -> Result<Option<Fleet>, Error> {
    // Other programs set RANK alone.
    let (Some(rank), Some(size)) = (number(variables, "RANK")?, number(variables, "WORLD_SIZE")?)
    else {
        return Ok(None);
    };
    let master =
        variables("MASTER_ADDR").map(|host| Rendezvous::Address { host, port: RENDEZVOUS_PORT });
    let rendezvous = named_address(variables)?.or(master).unwrap_or(Rendezvous::Unknown);
    let run = variables("TORCHELASTIC_RUN_ID").unwrap_or_default();
    let attempt = number(variables, "TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0);
    Ok(Some(Fleet {
        local_rank: number(variables, "LOCAL_RANK")?,
        job: format!("torchrun {run}.{attempt}"),
        rendezvous,
        ..fleet(Launcher::Torchrun, rank, size)
    }))
}

fn of_open_mpi(variables: Variables<'_>) -> Result<Option<Fleet>, Error> {
    let variable = "OMPI_COMM_WORLD_RANK";
    let Some(rank) = number(variables, variable)? else { return Ok(None) };
    let cure = "start the ranks with mpirun";
    let size = required(variables, variable, "OMPI_COMM_WORLD_SIZE", cure)?;
    Ok(Some(Fleet {
        local_rank: number(variables, "OMPI_COMM_WORLD_LOCAL_RANK")?,
        rendezvous: named_address(variables)?.unwrap_or(Rendezvous::Unknown),
        has_pmix: has_pmix(variables, rank),
        ..fleet(Launcher::OpenMpi, rank, size)
    }))
}

fn of_pmi(variables: Variables<'_>) -> Result<Option<Fleet>, Error> {
    let Some(rank) = number(variables, "PMI_RANK")? else { return Ok(None) };
    let cure = "start the ranks with mpiexec.hydra or srun --mpi=pmi2";
    let size = required(variables, "PMI_RANK", "PMI_SIZE", cure)?;
    let descriptor = number(variables, "PMI_FD")?.and_then(|number| i32::try_from(number).ok());
    let by_pmi = descriptor.map(|descriptor| Rendezvous::Pmi { descriptor });
    let rendezvous = match by_pmi {
        Some(by_pmi) => by_pmi,
        None => named_address(variables)?.unwrap_or(Rendezvous::Unknown),
    };
    let fleet = Fleet {
        local_rank: number(variables, "MPI_LOCALRANKID")?,
        rendezvous,
        ..fleet(Launcher::Pmi, rank, size)
    };
    Ok(Some(with_step(fleet, variables)?))
}

fn of_pmix(variables: Variables<'_>) -> Result<Option<Fleet>, Error> {
    let Some(rank) = number(variables, "PMIX_RANK")? else { return Ok(None) };
    let cure = "start the ranks with srun --mpi=pmix or mpirun";
    let size = required(variables, "PMIX_RANK", "SLURM_STEP_NUM_TASKS", cure)?;
    let has_pmix = has_pmix(variables, rank);
    let fleet = Fleet { has_pmix, ..fleet(Launcher::Pmix, rank, size) };
    Ok(Some(with_meeting_place(with_step(fleet, variables)?, variables)?))
}

/// Whether the variables are of a server of PMIx for this rank, and the user names no other meeting
/// place.
fn has_pmix(variables: Variables<'_>, rank: u32) -> bool {
    let is_of_rank = variables("PMIX_RANK").is_some_and(|number| number == rank.to_string());
    let is_named = variables("HAUL_RENDEZVOUS").is_some();
    is_of_rank && variables("PMIX_NAMESPACE").is_some() && !is_named
}

fn of_slurm(variables: Variables<'_>) -> Result<Option<Fleet>, Error> {
    // The script of a job has a rank and no step: it is one process, and not rank 0.
    let (Some(rank), Some(_)) = (number(variables, "SLURM_PROCID")?, variables("SLURM_STEP_ID"))
    else {
        return Ok(None);
    };
    let cure = "start the ranks with srun";
    let size = required(variables, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", cure)?;
    let fleet = with_step(fleet(Launcher::Slurm, rank, size), variables)?;
    Ok(Some(with_meeting_place(fleet, variables)?))
}

/// Adds the meeting place of the tasks of a step: the first host, unless the user names a place.
fn with_meeting_place(mut fleet: Fleet, variables: Variables<'_>) -> Result<Fleet, Error> {
    let part = |name| variables(name).unwrap_or_default();
    fleet.job = format!("Slurm {}.{}", part("SLURM_JOB_ID"), part("SLURM_STEP_ID"));
    fleet.rendezvous = match (named_address(variables)?, &fleet.hosts) {
        (Some(named), _) => named,
        (None, Some(hosts)) => {
            // The list's order is not the order of the ranks, so rank 0 may be on another host.
            let host = hosts.first().cloned().unwrap_or_default();
            let is_there = variables("SLURMD_NODENAME").as_ref() == Some(&host);
            fleet.listens = is_there && fleet.local_rank == Some(0);
            let port = reserved_port(variables)?.unwrap_or(RENDEZVOUS_PORT);
            Rendezvous::Address { host, port }
        }
        (None, None) => Rendezvous::Unknown,
    };
    Ok(fleet)
}

fn of_kubernetes(variables: Variables<'_>) -> Result<Option<Fleet>, Error> {
    let Some(rank) = number(variables, "JOB_COMPLETION_INDEX")? else { return Ok(None) };
    let cure = "set it to the completions of the Job, because Kubernetes does not";
    let size = required(variables, "JOB_COMPLETION_INDEX", "HAUL_SIZE", cure)?;
    let rendezvous = named_address(variables)?.unwrap_or(Rendezvous::Unknown);
    Ok(Some(Fleet { rendezvous, ..fleet(Launcher::Kubernetes, rank, size) }))
}

/// Adds what Slurm states about the step, if the ranks are the tasks of the step. The list of the
/// job may have other hosts.
fn with_step(fleet: Fleet, variables: Variables<'_>) -> Result<Fleet, Error> {
    let rank = number(variables, "SLURM_PROCID")?;
    let size = number(variables, "SLURM_STEP_NUM_TASKS")?;
    if (rank, size) != (Some(fleet.rank), Some(fleet.size)) {
        return Ok(fleet);
    }
    let variable = "SLURM_STEP_NODELIST";
    let hosts = match variables(variable) {
        Some(value) => Some(expand(&value).map_err(|error| Error::Variable {
            variable,
            value,
            problem: error.to_string(),
        })?),
        None => None,
    };
    let local_rank = number(variables, "SLURM_LOCALID")?.or(fleet.local_rank);
    Ok(Fleet { local_rank, hosts, ..fleet })
}

/// The first port that `srun --resv-ports` reserved for the step.
fn reserved_port(variables: Variables<'_>) -> Result<Option<u16>, Error> {
    let variable = "SLURM_STEP_RESV_PORTS";
    let Some(value) = variables(variable) else { return Ok(None) };
    match value.split(['-', ',']).next().and_then(|first| first.parse().ok()) {
        Some(port) => Ok(Some(port)),
        None => Err(Error::Variable { variable, value, problem: "not a range of ports".into() }),
    }
}

/// The meeting place that the user names. An IPv6 address has brackets.
fn named_address(variables: Variables<'_>) -> Result<Option<Rendezvous>, Error> {
    let variable = "HAUL_RENDEZVOUS";
    let Some(value) = variables(variable) else { return Ok(None) };
    let (host, port) = match value.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
            (host, port.parse().ok())
        }
        _ => (&value[..], Some(RENDEZVOUS_PORT)),
    };
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    match port {
        Some(port) if !host.is_empty() => {
            Ok(Some(Rendezvous::Address { host: host.to_owned(), port }))
        }
        _ => {
            let problem = "write HOST:PORT".into();
            Err(Error::Variable { variable, value, problem })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(row: &str) -> Result<Fleet, Error> {
        Fleet::from_variables(&|name| {
            row.split_ascii_whitespace()
                .filter_map(|word| word.split_once('='))
                .find_map(|(key, value)| (key == name).then(|| value.to_owned()))
        })
    }

    const SRUN: &str = "SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_NODEID=0 \
        SLURM_LOCALID=1 SLURM_GTIDS=0,1,2 SLURM_STEP_NODELIST=node[1-2] SLURM_NODELIST=node[1-3] \
        SLURM_STEP_TASKS_PER_NODE=3,1 SLURM_JOB_ID=3 SLURM_STEP_ID=0 SLURMD_NODENAME=node1";
    const MPIRUN: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 \
        OMPI_COMM_WORLD_LOCAL_RANK=0 PMIX_RANK=1 PMIX_NAMESPACE=3138977793";
    const TORCHRUN: &str = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1 \
        MASTER_ADDR=node1 MASTER_PORT=30005 TORCHELASTIC_RUN_ID=none \
        TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_USE_AGENT_STORE=True";

    fn address(host: &str, port: u16) -> Rendezvous {
        Rendezvous::Address { host: host.to_owned(), port }
    }

    /// The variables that the launchers set on real hosts.
    #[test]
    fn each_launcher_is_read() {
        let hosts = Some(vec!["node1".to_owned(), "node2".to_owned()]);
        let slurm = Fleet {
            local_rank: Some(1),
            hosts: hosts.clone(),
            rendezvous: address("node1", RENDEZVOUS_PORT),
            job: "Slurm 3.0".to_owned(),
            listens: false,
            is_in_slurm: true,
            ..fleet(Launcher::Slurm, 1, 4)
        };
        assert_eq!(read(SRUN).unwrap(), slurm);
        // Rank 1 may be the first process of the first host.
        assert!(read(&SRUN.replace("LOCALID=1", "LOCALID=0")).unwrap().listens);
        let reserved = format!("{SRUN} SLURM_STEP_RESV_PORTS=30004-30005");
        assert_eq!(read(&reserved).unwrap().rendezvous, address("node1", 30004));

        let pmi2 = format!("{SRUN} PMI_FD=11 PMI_RANK=1 PMI_SIZE=4 PMI_JOBID=2.0");
        let pmi = Fleet {
            local_rank: Some(1),
            hosts,
            rendezvous: Rendezvous::Pmi { descriptor: 11 },
            is_in_slurm: true,
            ..fleet(Launcher::Pmi, 1, 4)
        };
        assert_eq!(read(&pmi2).unwrap(), pmi);

        let pmix = read(&format!("{SRUN} PMIX_RANK=1 PMIX_NAMESPACE=slurm.pmix.1.0")).unwrap();
        assert_eq!((pmix.launcher, pmix.rank, pmix.size), (Launcher::Pmix, 1, 4));
        assert_eq!((pmix.rendezvous, pmix.has_pmix), (address("node1", RENDEZVOUS_PORT), true));

        let open_mpi =
            Fleet { local_rank: Some(0), has_pmix: true, ..fleet(Launcher::OpenMpi, 1, 2) };
        assert_eq!(read(MPIRUN).unwrap(), open_mpi);
        let named = read(&format!("{MPIRUN} HAUL_RENDEZVOUS=head:1")).unwrap();
        assert_eq!((named.rendezvous, named.has_pmix), (address("head", 1), false));

        let hydra = read("PMI_RANK=1 PMI_SIZE=3 PMI_FD=5 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1");
        let expected = Fleet {
            local_rank: Some(0),
            rendezvous: Rendezvous::Pmi { descriptor: 5 },
            ..fleet(Launcher::Pmi, 1, 3)
        };
        assert_eq!(hydra.unwrap(), expected);

        let torchrun = Fleet {
            local_rank: Some(0),
            rendezvous: address("node1", RENDEZVOUS_PORT),
            job: "torchrun none.0".to_owned(),
            ..fleet(Launcher::Torchrun, 1, 4)
        };
        assert_eq!(read(TORCHRUN).unwrap(), torchrun);

        let job = "JOB_COMPLETION_INDEX=1 HAUL_SIZE=4 HAUL_RENDEZVOUS=push-0.push:5000";
        let kubernetes =
            Fleet { rendezvous: address("push-0.push", 5000), ..fleet(Launcher::Kubernetes, 1, 4) };
        assert_eq!(read(job).unwrap(), kubernetes);
    }

    #[test]
    fn the_innermost_launcher_counts() {
        let daemon = "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0 SLURM_JOB_ID=3 \
            SLURM_STEP_NODELIST=node[1-2]";
        let inner = read(&format!("{MPIRUN} {daemon}")).unwrap();
        assert_eq!((inner.launcher, inner.rank, &inner.hosts), (Launcher::OpenMpi, 1, &None));
        let inner = read(&format!("PMI_RANK=1 PMI_SIZE=4 PMI_FD=5 {daemon}")).unwrap();
        assert_eq!((inner.size, inner.hosts), (4, None));
        let inner = read(&format!("{TORCHRUN} {SRUN}")).unwrap();
        assert_eq!(inner.launcher, Launcher::Torchrun);
        let inner = read(&format!("HAUL_RANK=0 HAUL_SIZE=2 {TORCHRUN} {SRUN}")).unwrap();
        assert_eq!((inner.launcher, inner.size), (Launcher::Haul, 2));
    }

    #[test]
    fn a_restart_of_torchrun_is_another_attempt() {
        let again = TORCHRUN.replace("RESTART_COUNT=0", "RESTART_COUNT=2");
        assert_eq!(read(&again).unwrap().job, "torchrun none.2");
    }

    #[test]
    fn a_meeting_place_is_a_host_and_a_port() {
        let read = |value: &str| read(&format!("HAUL_RANK=0 HAUL_SIZE=1 HAUL_RENDEZVOUS={value}"));
        for (value, host, port) in [
            ("head", "head", RENDEZVOUS_PORT),
            ("head:1", "head", 1),
            ("2001:db8::1", "2001:db8::1", RENDEZVOUS_PORT),
            ("[2001:db8::1]:7", "2001:db8::1", 7),
        ] {
            assert_eq!(read(value).unwrap().rendezvous, address(host, port), "{value}");
        }
        for value in ["head:", "head:x", ":5", "head:70000"] {
            assert!(read(value).unwrap_err().to_string().contains("write HOST:PORT"), "{value}");
        }
    }

    #[test]
    fn what_is_not_a_rank_is_refused_with_the_cure() {
        for (row, part) in [
            ("", "haul finds no launcher here"),
            ("SLURM_PROCID=0 SLURM_NTASKS=6 SLURM_JOB_ID=3", "start haul with srun"),
            ("SLURM_JOB_ID=3 SLURM_NODELIST=node[1-2]", "start haul with srun"),
            ("JOB_COMPLETION_INDEX=1", "HAUL_SIZE is not: set it to the completions"),
            ("HAUL_RANK=1", "HAUL_SIZE is not: set both"),
            ("HAUL_RANK=2 HAUL_SIZE=2", "rank 2 of 2 ranks"),
            ("HAUL_RANK=x HAUL_SIZE=2", "HAUL_RANK=x: not a number"),
            ("HAUL_RANK=0 HAUL_SIZE=0", "rank 0 of 0 ranks"),
            ("HAUL_RANK=0 HAUL_SIZE=4000000000", "is not possible"),
        ] {
            let message = read(row).unwrap_err().to_string();
            assert!(message.contains(part), "{row}: {message}");
        }
        let torn = SRUN.replace("STEP_NODELIST=node[1-2]", "STEP_NODELIST=node[1-2");
        let message = read(&torn).unwrap_err().to_string();
        assert_eq!(message, "SLURM_STEP_NODELIST=node[1-2: unbalanced bracket at byte 4");
    }
}

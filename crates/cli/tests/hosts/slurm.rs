//! A Slurm cluster of hosts on this machine: the controller on head, a daemon on each other host.

use crate::cluster::Cluster;
use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait for the hosts to be idle.
const LIMIT: Duration = Duration::from_secs(60);

/// A Slurm cluster.
pub struct Slurm {
    pub cluster: Cluster,
}

impl Slurm {
    /// Starts Slurm on so many hosts. `None`, with a line, if this machine cannot have it.
    pub fn start(count: usize, rate: Option<&str>) -> Option<Self> {
        for name in ["slurmctld", "slurmd", "srun", "munged"] {
            crate::program::program(name)?;
        }
        let cluster = Cluster::start(count, rate)?;
        let slurm = Self { cluster };
        let path = |name: &str| slurm.path(name);
        fs::write(path("slurm.conf"), Self::configuration(count)).unwrap();
        // The hosts share /tmp.
        fs::write(path("mpi.conf"), "PMIxCliTmpDirBase=/srv\n").unwrap();
        let mut key = vec![0; 1024];
        fastrand::fill(&mut key);
        fs::write(path("munge.key"), key).unwrap();
        slurm.run(0, &format!("chmod 400 {}", path("munge.key")));
        for host in 0..=count {
            slurm.run(
                host,
                &format!(
                    "mkdir -m 755 /run/munge && munged --key-file={} --log-file=/srv/munged.log \
                     --seed-file=/srv/munge.seed --num-threads=1",
                    path("munge.key")
                ),
            );
        }
        slurm.run(0, &format!("mkdir /srv/state && slurmctld -c -f {}", path("slurm.conf")));
        for host in 1..=count {
            slurm.run(host, &format!("slurmd -N host{host} -f {}", path("slurm.conf")));
        }
        let deadline = Instant::now() + LIMIT;
        let idle = format!("SLURM_CONF={} sinfo -h -t idle -o %D", path("slurm.conf"));
        while slurm.cluster.sh(0, &idle).stdout != format!("{count}\n").as_bytes() {
            assert!(Instant::now() < deadline, "the hosts of Slurm are not idle");
            thread::sleep(Duration::from_millis(100));
        }
        Some(slurm)
    }

    fn path(&self, name: &str) -> String {
        self.cluster.folder.path().join(name).display().to_string()
    }

    fn configuration(count: usize) -> String {
        let host = |host| {
            let address = Cluster::address(host);
            format!("NodeName=host{host} NodeHostname=host{host} NodeAddr={address} CPUs=4")
        };
        let hosts = (1..=count).map(host).collect::<Vec<_>>().join("\n");
        format!(
            "ClusterName=haul\nSlurmctldHost=host0({})\nSlurmUser=root\nAuthType=auth/munge\n\
             CredType=cred/munge\nStateSaveLocation=/srv/state\nSlurmdSpoolDir=/srv/spool\n\
             SlurmctldPidFile=/run/slurmctld.pid\nSlurmdPidFile=/run/slurmd.pid\n\
             SlurmctldLogFile=/srv/slurmctld.log\nSlurmdLogFile=/srv/slurmd.log\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
             JobAcctGatherType=jobacct_gather/none\nSelectType=select/cons_tres\n\
             SelectTypeParameters=CR_CPU\nSlurmdParameters=config_overrides\nReturnToService=2\n\
             KillWait=5\nMailProg=/bin/true\n{hosts}\n\
             PartitionName=haul Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n",
            Cluster::address(0)
        )
    }

    fn run(&self, host: usize, line: &str) {
        let output = self.cluster.sh(host, line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "host{host}: {line}: {errors}");
    }

    /// A command of Slurm on head.
    pub fn command(&self, program: &str) -> Command {
        let mut command = self.cluster.command(0, "env");
        command.arg(format!("SLURM_CONF={}", self.path("slurm.conf"))).arg(program);
        command
    }
}

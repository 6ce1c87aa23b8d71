//! `haul fleet` under real launchers.

use std::process::Command;

const HAUL: &str = env!("CARGO_BIN_EXE_haul");

#[test]
fn ranks_of_hydra_meet() {
    // Debian's alternatives may give the name mpiexec to Open MPI.
    let mut hydra = Command::new("mpiexec.hydra");
    hydra.args(["-n", "3", HAUL, "fleet", "hosts"]);
    let Ok(output) = hydra.output() else {
        eprintln!("SKIPPED: there is no mpiexec.hydra (apt install mpich)");
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.starts_with("3 ranks on 1 hosts, started by PMI\nrank 0  "), "{text}");
    assert_eq!(text.lines().count(), 4, "{text}");
}

/// Without a variable of haul: the ranks find each other by PMIx.
#[test]
fn ranks_of_open_mpi_meet() {
    let mut mpirun = Command::new("mpirun.openmpi");
    mpirun.args(["--oversubscribe", "-n", "3", HAUL, "fleet", "hosts"]);
    // Open MPI refuses root otherwise.
    mpirun.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    let Ok(output) = mpirun.output() else {
        eprintln!("SKIPPED: there is no mpirun.openmpi (apt install openmpi-bin)");
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.starts_with("3 ranks on 1 hosts, started by Open MPI\nrank 0  "), "{text}");
    assert_eq!(text.lines().count(), 4, "{text}");
}

#[test]
fn ranks_of_hydra_on_one_host_make_one_copy() {
    let folder = tempfile::tempdir().unwrap();
    let (source, copy) = (folder.path().join("source"), folder.path().join("copy"));
    std::fs::write(&source, vec![7; 10 << 20]).unwrap();
    let mut hydra = Command::new("mpiexec.hydra");
    hydra.args(["-n", "3", HAUL, "fleet", "push"]).arg(&source).arg(&copy);
    let Ok(output) = hydra.output() else {
        eprintln!("SKIPPED: there is no mpiexec.hydra (apt install mpich)");
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.starts_with("1 file (10.0 MiB) sent to all 1 hosts"), "{text}");
    assert_eq!(std::fs::read(&copy).unwrap(), std::fs::read(&source).unwrap());
}

#[test]
fn what_is_not_a_rank_is_refused_in_a_line() {
    for (variables, part) in [
        (&[("SLURM_JOB_ID", "5"), ("SLURM_PROCID", "0")][..], "start haul with srun"),
        (&[("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("PMI_FD", "77")], "PMI_FD=77: "),
        (&[("RANK", "0"), ("WORLD_SIZE", "2")], "torchrun does not name a meeting place"),
        (
            &[("HAUL_RANK", "1"), ("HAUL_SIZE", "2"), ("HAUL_RENDEZVOUS", "192.0.2.1:5")],
            "the ranks cannot recognize each other: set HAUL_TOKEN",
        ),
    ] {
        let mut command = Command::new(HAUL);
        command.args(["fleet", "hosts"]).env_clear().envs(variables.iter().copied());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(part), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}

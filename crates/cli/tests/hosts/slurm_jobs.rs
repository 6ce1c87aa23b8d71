//! `haul fleet` under Slurm.

use crate::command::run;
use crate::slurm::Slurm;
use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

const HAUL: &str = env!("CARGO_BIN_EXE_haul");

fn make_file(slurm: &Slurm, bytes: usize) -> PathBuf {
    let mut content = vec![0; bytes];
    fastrand::fill(&mut content);
    let path = slurm.cluster.folder.path().join("original");
    fs::write(&path, content).unwrap();
    path
}

/// The hosts of 1 to `count` that have the copy.
fn copies(slurm: &Slurm, count: usize, source: &Path) -> Vec<usize> {
    (1..=count).filter(|&host| slurm.cluster.has_copy(host, source, "/srv/original")).collect()
}

/// All tasks, two tasks a host, tasks whose order is not the order of the hosts, and a step that is
/// smaller than its job.
#[test]
fn every_host_of_a_step_gets_the_copy() {
    let Some(slurm) = Slurm::start(4, None) else { return };
    let source = make_file(&slurm, 24 << 20);
    for (line, hosts) in [
        (&["srun", "--mpi=pmi2", "-N4"][..], &[1, 2, 3, 4][..]),
        (&["srun", "--mpi=pmi2", "-N4", "-n8"], &[1, 2, 3, 4]),
        (&["srun", "--mpi=pmi2", "-N3", "-n6", "-m", "cyclic"], &[1, 2, 3]),
        (&["salloc", "-Q", "-N4", "srun", "--mpi=pmi2", "-N2", "-n2"], &[1, 2]),
    ] {
        let mut command = slurm.command(line[0]);
        command.args(&line[1..]).args([HAUL, "fleet", "push"]).arg(&source).arg("/srv/");
        let (output, transcript) = run(&mut command);
        assert!(output.status.success(), "{transcript}");
        assert!(transcript.contains(&format!("to all {} hosts", hosts.len())), "{transcript}");
        assert_eq!(copies(&slurm, 4, &source), hosts, "{transcript}");
        for host in 1..=4 {
            slurm.cluster.sh(host, "rm -f /srv/original");
        }
    }
}

#[test]
fn ranks_meet_by_pmix() {
    let Some(slurm) = Slurm::start(3, None) else { return };
    let (_, kinds) = run(slurm.command("srun").arg("--mpi=list"));
    let has_library = Path::new("/usr/lib").join(format!("{ARCH}-linux-gnu/libpmix.so")).exists();
    if !kinds.contains("pmix") || !has_library {
        eprintln!("SKIPPED: Slurm lacks PMIx (apt install libpmix-dev): {kinds}");
        return;
    }
    let source = make_file(&slurm, 1 << 20);
    let mut command = slurm.command("srun");
    command.args(["--mpi=pmix", "-N3", "-n4", HAUL, "fleet", "push"]).arg(&source).arg("/srv/");
    let (output, transcript) = run(&mut command);
    assert!(output.status.success(), "{transcript}");
    assert_eq!(copies(&slurm, 3, &source), [1, 2, 3], "{transcript}");
}

/// Without PMI, the ranks meet at an address, and munge proves the user of each.
#[test]
fn ranks_without_pmi_meet_by_munge() {
    let Some(slurm) = Slurm::start(3, None) else { return };
    let source = make_file(&slurm, 1 << 20);
    let mut command = slurm.command("srun");
    command.args(["-N3", "-n4", HAUL, "fleet", "push"]).arg(&source).arg("/srv/");
    let (output, transcript) = run(&mut command);
    assert!(output.status.success(), "{transcript}");
    assert_eq!(copies(&slurm, 3, &source), [1, 2, 3], "{transcript}");
    // A process of another user cannot join.
    let stranger = format!(
        "install -m 755 {HAUL} /srv/haul && setpriv --reuid=65534 --clear-groups \
         env HAUL_RANK=1 HAUL_SIZE=2 SLURM_JOB_ID=1 \
         HAUL_RENDEZVOUS={}:4287 /srv/haul fleet hosts",
        crate::cluster::Cluster::address(1)
    );
    let mut listening = slurm.cluster.command(1, "env");
    listening.args(["HAUL_RANK=0", "HAUL_SIZE=2", "SLURM_JOB_ID=1"]);
    listening.arg("HAUL_RENDEZVOUS=10.77.0.2:4287").args([HAUL, "fleet", "hosts"]);
    let listening = listening.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let listening = crate::running::Running(listening);
    let output = slurm.cluster.sh(2, &stranger);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("one rank is a process of user 65534, and the other rank of user 0"),
        "{text}"
    );
    drop(listening);
}

/// The ranks of a job that ends leave no process and no incomplete file, and the next job goes on.
#[test]
fn a_job_that_is_cancelled_goes_on_later() {
    let Some(slurm) = Slurm::start(3, Some("200mbit")) else { return };
    let source = make_file(&slurm, 64 << 20);
    let push = || {
        let mut command = slurm.command("srun");
        command.args(["--mpi=pmi2", "-N3", HAUL, "fleet", "push"]).arg(&source).arg("/srv/");
        command
    };
    let wait_until = |what: &str, is_met: &dyn Fn() -> bool| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_met() {
            assert!(Instant::now() < deadline, "gave up waiting for {what}");
            thread::sleep(Duration::from_millis(50));
        }
    };
    for end in ["scancel -u root", "pkill -TERM -o srun", "pkill -KILL -o srun"] {
        for host in 1..=3 {
            slurm.cluster.sh(host, "rm -f /srv/original /srv/.original*");
        }
        let mut command = push();
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_until("a part at host 3", &|| {
            let blocks = slurm.cluster.sh(3, "stat -c %b /srv/.original.haul-part");
            String::from_utf8_lossy(&blocks.stdout).trim().parse().unwrap_or(0_u64) > 8 << 11
        });
        let (program, arguments) = end.split_once(' ').unwrap();
        let mut command = slurm.command(program);
        assert!(command.args(arguments.split(' ')).status().unwrap().success(), "{end}");
        let _ = crate::running::Running(child).0.wait();
        wait_until("the end of all ranks", &|| (1..=3).all(|host| !slurm.cluster.has_haul(host)));
        for host in 2..=3 {
            let exists = slurm.cluster.sh(host, "test -e /srv/original").status.success();
            assert!(!exists || slurm.cluster.has_copy(host, &source, "/srv/original"), "{end}");
        }
        // A job whose srun was killed is still in the queue.
        let _ = slurm.command("scancel").args(["-u", "root"]).status();
    }
    let (output, transcript) = run(&mut push());
    assert!(output.status.success(), "{transcript}");
    assert_eq!(copies(&slurm, 3, &source), [1, 2, 3]);
}

/// A link, a host and an MTU that differ are named, and nothing else.
#[test]
fn the_bench_of_all_pairs_names_what_differs() {
    let Some(slurm) = Slurm::start(4, Some("200mbit")) else { return };
    let report = slurm.cluster.folder.path().join("report.json");
    let bench = || {
        let mut command = slurm.command("srun");
        command.args(["--mpi=pmi2", "-N4", HAUL, "fleet", "bench", "--for", "500ms", "--json"]);
        let (output, transcript) = run(command.arg(&report));
        assert!(output.status.success(), "{transcript}");
        let text = fs::read_to_string(&report).unwrap();
        let report: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(report["pairs"].as_array().unwrap().len(), 12, "{transcript}");
        let sentences = report["findings"]["sentences"].as_array().unwrap();
        sentences.iter().map(|one| one.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(bench(), Vec::<String>::new());
    slurm.cluster.set_rate(2, "20mbit");
    let sentences = bench();
    assert!(sentences.len() == 1 && sentences[0].starts_with("host2 is slow: "), "{sentences:?}");
    slurm.cluster.set_rate(2, "200mbit");
    slurm.cluster.sh(3, "ip link set eth0 mtu 1400");
    assert_eq!(bench(), ["host3 has the MTU 1400, where others have 1500"]);
}

//! `haul bench copies`: the copies of each row are proved, and a share of sendfile's gain is stated
//! only if the gain was shown.

mod common {
    pub mod command;
    pub mod json;
    pub mod quiet;
    pub mod report;
    pub mod schema;
}

use common::command::{haul, run};
use common::json::json;
use common::quiet::is_quiet;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

#[test]
fn the_copies_of_each_row_are_proved() {
    if !is_quiet() {
        return;
    }
    let arguments = ["bench", "copies", "--rounds", "1", "--file", "1MiB", "--folios"];
    let arguments = [&arguments[..], &["small,huge", "--chunk", "64KiB", "--json", "-"]].concat();
    let report = json(&mut haul(&arguments));
    assert_eq!(report["experiment"], "copies");
    let rows = report["rows"].as_array().unwrap();
    let copies = [("read+write", 2), ("mapped+write", 1), ("sendfile-copied", 1), ("sendfile", 0)];
    for place in ["tmpfs", "tmpfs-huge"] {
        for (path, copies) in copies {
            let row = rows.iter().find(|row| row["path"] == path && row["place"] == place).unwrap();
            if let Some(reason) = row["refused"].as_str() {
                eprintln!("SKIPPED: {path}: {reason}");
                continue;
            }
            let lent = if copies == 0 { 16 } else { 0 };
            assert_eq!(row["lent_pages"].as_u64(), Some(lent), "{row}");
            assert_eq!(row["copies"].as_u64(), Some(copies), "{row}");
            assert!(row["kept"].is_null(), "one round shows no gain: {row}");
        }
    }
    let send = rows.iter().find(|row| row["path"] == "send").unwrap();
    assert_eq!((send["copies"].as_u64(), send["place"].as_str()), (Some(1), Some("")), "{send}");
}

#[test]
fn lock_step_needs_neither_root_nor_a_quiet_machine() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    // Another user cannot read the folder of the build.
    let program = folder.path().join("haul");
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_haul")).arg(&program).status();
    assert!(copied.unwrap().success());
    let ladder = "bench copies --meter cycles --rounds 9 --file 1MiB --chunk 64KiB --json -";
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    command.arg(&program).args(ladder.split(' '));
    if !rustix::process::geteuid().is_root() {
        command = Command::new(&program);
        command.args(ladder.split(' '));
    }
    let report = json(&mut command);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 7, "{report}");
    for row in rows {
        let path = row["path"].as_str().unwrap();
        if let Some(reason) = row["refused"].as_str() {
            assert!(path == "sendfile-copied" && reason.contains("not on this kernel"), "{row}");
            continue;
        }
        // Slow rounds do not count, but a quarter of the rounds does on any machine.
        assert!(row["meter"] == "cycles" && row["rounds"].as_u64() > Some(2), "{row}");
        let lent = if ["sendfile", "splice", "floor"].contains(&path) { 16 } else { 0 };
        assert_eq!(row["lent_pages"].as_u64(), Some(lent), "{row}");
        assert!(row["sender_us_per_mib"]["median"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn a_batch_that_the_sockets_do_not_hold_is_refused() {
    let ladder = "bench copies --meter cycles --rounds 1 --file 64KiB --chunk 64KiB --in-flight";
    let arguments: Vec<&str> = ladder.split(' ').chain(["1GiB"]).collect();
    let (output, transcript) = run(&mut haul(&arguments));
    assert!(!output.status.success(), "{transcript}");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("does not fit into the sockets' buffers"), "{transcript}");
}

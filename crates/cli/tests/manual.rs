//! Shell completions and manual pages.

mod common {
    pub mod command;
}

use common::command::{haul, run};
use std::process::Command;

#[test]
fn completions_are_scripts_that_their_shell_accepts() {
    for shell in ["bash", "zsh", "fish"] {
        let (output, transcript) = run(&mut haul(&["completions", shell]));
        assert!(output.status.success(), "{transcript}");
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(script.contains("--tls-listen") || script.contains("tls-listen"), "{script}");
        if shell == "bash" {
            let status = Command::new("bash").args(["-n", "-c", &script]).status().unwrap();
            assert!(status.success());
        }
    }
    let (output, transcript) = run(&mut haul(&["completions", "cmd.exe"]));
    assert_eq!(output.status.code(), Some(2), "{transcript}");
    assert!(transcript.contains("bash"), "{transcript}");
}

#[test]
fn every_subcommand_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    // It is created if only the last part of its name does not exist.
    let folder = folder.path().join("man1");
    let dir = folder.to_str().unwrap();
    let (output, transcript) = run(&mut haul(&["man", dir]));
    assert!(output.status.success(), "{transcript}");
    for (page, text) in [
        ("haul.1", "SUBCOMMANDS"),
        ("haul-serve.1", "tls\\-listen"),
        ("haul-bench.1", "haul\\-bench\\-send"),
        ("haul-bench-send.1", "workload"),
        ("haul-soak.1", "baseline"),
    ] {
        let content = std::fs::read_to_string(folder.join(page)).unwrap();
        assert!(content.contains(text), "{text} in {page}: {content}");
    }
    let (output, transcript) = run(&mut haul(&["man", "/no/such/directory"]));
    assert_eq!((output.status.code(), transcript.contains("/no/such")), (Some(2), true));
}

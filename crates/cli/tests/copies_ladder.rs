//! The C program that asks the question of `haul bench copies` without haul: its proof agrees with
//! haul's.

use std::path::Path;
use std::process::{Command, Output};

fn run(program: &mut Command) -> Output {
    program.output().unwrap_or_else(|error| panic!("{}: {error}", program.get_program().display()))
}

#[test]
fn the_ladder_in_c_proves_the_copies() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/claims/ladder.c");
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("ladder");
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program).arg(source);
    let compiled = run(&mut compiler);
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = run(Command::new(&program).args(["1M", "64K"]));
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    let lent = |name: &str| {
        let line = text.lines().find(|line| line.split_whitespace().next() == Some(name));
        line.unwrap_or_else(|| panic!("{text}")).split_whitespace().nth(1).unwrap().to_owned()
    };
    for copying in ["read+write", "mapped+write", "send"] {
        assert_eq!(lent(copying), "0/16", "{text}");
    }
    assert_eq!(lent("sendfile"), "16/16", "{text}");
    // "not on this kernel" before Linux 6.6.
    assert!(["0/16", "not"].contains(&lent("sendfile-copied").as_str()), "{text}");
    let refused = run(Command::new(&program).arg("4K"));
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("usage"));
}

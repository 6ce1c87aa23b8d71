//! Lists of hosts expand as by Slurm's own command.

use proptest::prelude::*;
use std::path::Path;
use std::process::Command;

/// The names that `scontrol show hostnames` prints; `None` if scontrol is not installed.
fn by_scontrol(folder: &Path, list: &str) -> Option<Vec<String>> {
    // scontrol reads a configuration before everything else, and uses nothing of it here.
    let configuration = folder.join("slurm.conf");
    let text = "ClusterName=c\nSlurmctldHost=localhost\nNodeName=n\nPartitionName=p Nodes=n\n";
    std::fs::write(&configuration, text).unwrap();
    let mut command = Command::new("scontrol");
    command.args(["show", "hostnames", list]).env("SLURM_CONF", configuration);
    let output = command.output().ok()?;
    assert!(output.status.success(), "{list}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    Some(text.lines().map(str::to_owned).collect())
}

#[test]
fn lists_expand_as_by_scontrol() {
    let folder = tempfile::tempdir().unwrap();
    if by_scontrol(folder.path(), "n1").is_none() {
        eprintln!("SKIPPED: there is no scontrol (apt install slurm-client)");
        return;
    }
    let range = (0_u32..120, 0_u32..12, 1_usize..4).prop_map(|(first, more, width)| match more {
        0 => format!("{first:0width$}"),
        _ => format!("{first:0width$}-{:0width$}", first + more),
    });
    let ranges = prop::collection::vec(range, 1..4).prop_map(|ranges| ranges.join(","));
    // scontrol takes two brackets at most of a name, and no text after the last.
    let name = ("[a-z]{1,3}", ranges.clone(), prop::option::of(("[a-z]", ranges)));
    let name = name.prop_map(|(text, ranges, second)| {
        let second = second.map(|(text, ranges)| format!("{text}[{ranges}]")).unwrap_or_default();
        format!("{text}[{ranges}]{second}")
    });
    let name = prop_oneof![name, "[a-z]{1,4}[0-9]{0,3}"];
    let list = prop::collection::vec(name, 1..4).prop_map(|names| names.join(","));
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) };
    proptest!(config, |(list in list)| {
        let expected = by_scontrol(folder.path(), &list).unwrap();
        prop_assert_eq!(haul_fleet::expand(&list).unwrap(), expected);
    });
}

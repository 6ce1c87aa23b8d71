//! `haul schema`, and the page of documentation that is made from it. The tests of each command
//! validate its reports.

mod common {
    pub mod command;
}

use common::command::{haul, run};
use serde_json::Value;
use std::path::Path;

#[test]
fn the_page_of_fields_is_that_of_this_version() {
    let (output, transcript) = run(&mut haul(&["schema", "--markdown"]));
    assert!(output.status.success(), "{transcript}");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/json.md");
    let is_current = std::fs::read(page).unwrap() == output.stdout;
    assert!(is_current, "write it again: cargo run -- schema --markdown > docs/json.md");
}

#[test]
fn each_listed_name_has_a_schema() {
    let (output, transcript) = run(&mut haul(&["schema"]));
    assert!(output.status.success(), "{transcript}");
    let list = String::from_utf8(output.stdout).unwrap();
    let names: Vec<_> = list.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.contains(&"send") && names.contains(&"plan"), "{list}");
    for name in names {
        let (output, transcript) = run(&mut haul(&["schema", name]));
        let schema: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(jsonschema::meta::is_valid(&schema), "{transcript}");
        assert_eq!(schema["title"], format!("haul {name}"), "{transcript}");
        assert_described(&schema, name);
    }
}

/// Asserts that every field and every type of a schema has a description.
fn assert_described(schema: &Value, name: &str) {
    for kind in ["properties", "$defs"] {
        for (field, value) in schema[kind].as_object().into_iter().flatten() {
            let description = value["description"].as_str().unwrap_or_default();
            assert!(!description.is_empty(), "{name}: {field}");
            assert_described(value, &format!("{name} {field}"));
        }
    }
}

#[test]
fn an_unknown_name_is_refused_with_the_known_ones() {
    let (output, transcript) = run(&mut haul(&["schema", "sendd"]));
    assert_eq!(output.status.code(), Some(2), "{transcript}");
    assert!(transcript.contains("no schema \"sendd\" (there are send, "), "{transcript}");
}

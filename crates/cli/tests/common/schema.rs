//! Validates a report against the schema that `haul schema` prints for it.

use super::command::{haul, run};
use serde_json::Value;

/// Asserts that a report is valid, and that its schema describes every one of its fields.
pub fn assert_valid(name: &str, report: &Value) {
    let (output, transcript) = run(&mut haul(&["schema", name]));
    assert!(output.status.success(), "{transcript}");
    let mut schema: Value = serde_json::from_slice(&output.stdout).unwrap();
    forbid_other_fields(&mut schema);
    let validator = jsonschema::draft202012::new(&schema).unwrap();
    let errors: Vec<_> = validator
        .iter_errors(report)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(errors.is_empty(), "{name}: {errors:#?}");
}

/// A reader must accept fields of a later version. A test must not: each field is documented.
fn forbid_other_fields(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            if object.contains_key("properties") {
                object.insert("additionalProperties".into(), false.into());
            }
            object.values_mut().for_each(forbid_other_fields);
        }
        Value::Array(items) => items.iter_mut().for_each(forbid_other_fields),
        _ => {}
    }
}

//! Parses a report of the program under test.

use super::schema::assert_valid;
use serde_json::Value;

/// Parses a report, which must be valid.
pub fn parse_report(text: &[u8]) -> Result<Value, String> {
    let report: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let name = name_of(&report).ok_or("the report names no contract")?;
    assert_valid(&name, &report);
    Ok(report)
}

/// The name of the schema of a report, from the report's own fields.
fn name_of(report: &Value) -> Option<String> {
    let contract = report["schema"].as_str()?;
    let name = contract.strip_prefix("haul.").and_then(|name| name.split('/').next());
    match (name?, report["experiment"].as_str()) {
        ("bench", experiment) => experiment.map(str::to_owned),
        (name, _) => Some(name.to_owned()),
    }
}

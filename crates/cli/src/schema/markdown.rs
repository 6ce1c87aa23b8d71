//! The schemas as a Markdown page: a table of fields for each document and each type.

use super::Document;
use haul_bench::report;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write;

const INTRODUCTION: &str = "\
# JSON reports

`haul schema NAME` prints the JSON Schema (draft 2020-12) of a report. This page is made from the
same types by `haul schema --markdown`.

* `schema` names the contract and its version; the documents of `haul serve` and `haul proxy` have
  no such field. A new field keeps the version. A changed or removed field increases it. So a reader
  must ignore fields that it does not know.
* Units are the ends of the names: `us` is µs, `us_per_mib` µs of CPU time per MiB, `ratio` a
  quotient whose 1 means no difference. `percent` may exceed 100: for machines with several CPUs,
  100 is one of them.
* A value that was not measured is `null`.
* A value that was measured in rounds is an [Estimate](#estimate): a median, its interval, and the
  number of rounds.
* A file is replaced atomically: a reader finds a complete document.
* `haul bench --json FILE` without an experiment writes a list of reports, or one report if only one
  experiment was measured.

";

/// The page for all documents.
pub fn render(documents: &[Document]) -> String {
    let mut page = String::from(INTRODUCTION);
    let mut types: BTreeMap<&str, &Value> = BTreeMap::new();
    let is_report = |document: &&Document| {
        document.schema.pointer("/properties/schema/const") == Some(&report::SCHEMA.into())
    };
    let (reports, others): (Vec<_>, Vec<_>) = documents.iter().partition(is_report);
    page.push_str("| schema | written by |\n|---|---|\n");
    for Document { name, source, .. } in &reports {
        let _ = writeln!(page, "| [{name}](#reports-of-experiments) | {source} |");
    }
    for Document { name, source, .. } in &others {
        let _ = writeln!(page, "| [{name}](#haul-{name}) | {source} |");
    }
    page.push_str("\n## Reports of experiments\n");
    push_fields(&mut page, &any_report(&reports));
    for document in &others {
        let schema = document.schema.as_value();
        let _ =
            writeln!(page, "\n## haul {}\n\n{}", document.name, paragraph(&description(schema)));
        push_fields(&mut page, schema);
    }
    for document in documents {
        let definitions = document.schema.pointer("/$defs").and_then(Value::as_object);
        types.extend(definitions.into_iter().flatten().map(|(name, it)| (name.as_str(), it)));
    }
    page.push_str("\n## Types\n");
    for (name, definition) in types {
        let _ = writeln!(page, "\n### {name}\n\n{}", paragraph(&description(definition)));
        push_fields(&mut page, definition);
    }
    page
}

/// The fields that all experiments share. The rows and the name come from any experiment.
fn any_report(reports: &[&Document]) -> Value {
    let mut schema = reports.first().map_or(Value::Null, |first| first.schema.as_value().clone());
    for field in ["experiment", "rows"] {
        let pointer = format!("/properties/{field}");
        let types: Vec<_> =
            reports.iter().filter_map(|report| report.schema.pointer(&pointer)).cloned().collect();
        if let Some(field) = schema.pointer_mut(&pointer) {
            field["oneOf"] = types.into();
            field.as_object_mut().map(|field| field.remove("const"));
        }
    }
    schema
}

/// Appends a table of an object's fields, or of the values of an enumeration.
fn push_fields(page: &mut String, schema: &Value) {
    if let Some(fields) = schema["properties"].as_object() {
        page.push_str("\n| field | type | meaning |\n|---|---|---|\n");
        let required = schema["required"].as_array();
        for (name, field) in fields {
            let is_required = required.is_some_and(|names| names.contains(&name.as_str().into()));
            let absent = if is_required { "" } else { ", or absent" };
            let (kind, meaning) = (type_name(field), description(field));
            let _ = writeln!(page, "| `{name}` | {kind}{absent} | {meaning} |");
        }
    } else if let Some(values) = schema["oneOf"].as_array() {
        page.push_str("\n| value | meaning |\n|---|---|\n");
        for value in values {
            let _ = writeln!(page, "| {} | {} |", type_name(value), description(value));
        }
    } else {
        let _ = writeln!(page, "\n{}", paragraph(&format!("Type: {}", type_name(schema))));
    }
}

/// Text outside of tables, in lines of 100 columns.
fn paragraph(text: &str) -> String {
    textwrap::fill(text, 100)
}

/// The description, as one line of a table.
fn description(schema: &Value) -> String {
    let text = schema["description"].as_str().unwrap_or_default();
    text.replace("\n\n", " ").replace('\n', " ").replace('|', "\\|")
}

/// The type in words: `number`, `list of Estimate`, `text or null`.
fn type_name(schema: &Value) -> String {
    let Some(schema) = schema.as_object() else { return "any".into() };
    let text = |key: &str| schema.get(key).and_then(Value::as_str);
    let list = |key: &str| schema.get(key).and_then(Value::as_array);
    if let Some(value) = schema.get("const") {
        return format!("`{value}`");
    }
    if let Some(name) = text("$ref").and_then(|path| path.rsplit('/').next()) {
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(values) = list("enum") {
        return any_of(values.iter().map(|value| format!("`{value}`")));
    }
    if let Some(alternatives) = list("anyOf").or_else(|| list("oneOf")) {
        return any_of(alternatives.iter().map(type_name));
    }
    match schema.get("type") {
        Some(Value::Array(names)) => {
            any_of(names.iter().filter_map(Value::as_str).map(|name| simple_name(name, schema)))
        }
        Some(Value::String(name)) => simple_name(name, schema),
        _ => "any".into(),
    }
}

fn simple_name(name: &str, schema: &Map<String, Value>) -> String {
    match (name, schema.get("items")) {
        ("array", Some(items)) => format!("list of {}", type_name(items)),
        ("string", _) => "text".into(),
        _ => name.into(),
    }
}

fn any_of(names: impl Iterator<Item = String>) -> String {
    names.collect::<Vec<_>>().join(" or ")
}

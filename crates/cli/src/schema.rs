//! `haul schema`: the JSON Schema of each report, made from the types that the reports are written
//! from.

mod markdown;

use crate::arguments::SchemaArguments;
use crate::output::{self, Failure};
use crate::transfer::TransferLine;
use haul_bench::report::Report;
use haul_bench::{
    checksum, compare, copies, doctor, forward, interrupts, loan, profile, receive, send,
};
use haul_bench::{self_check, settings, soak_series, summary};
use haul_soak::report::SoakReport;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema};
use serde_json::Value;
use std::fmt::Write;
use std::process::ExitCode;

/// A JSON document that haul writes.
struct Document {
    /// Name of the schema.
    name: &'static str,
    /// The command that writes the document.
    source: &'static str,
    schema: Schema,
}

pub fn run(arguments: &SchemaArguments) -> Result<ExitCode, Failure> {
    let documents = documents();
    let text = match &arguments.name {
        _ if arguments.markdown => markdown::render(&documents),
        Some(name) => {
            let document = documents.iter().find(|document| document.name == name);
            let document = document.ok_or_else(|| {
                let names: Vec<_> = documents.iter().map(|document| document.name).collect();
                Failure::bad_input(format!("no schema {name:?} (there are {})", names.join(", ")))
            })?;
            haul_bench::export::json(&document.schema)
        }
        None => list(&documents),
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn list(documents: &[Document]) -> String {
    let mut text = String::new();
    for Document { name, source, .. } in documents {
        let _ = writeln!(text, "{name:<14} {source}");
    }
    text
}

/// All documents, in the order of the commands' help.
fn documents() -> Vec<Document> {
    vec![
        experiment::<send::SendRow>("send", "haul bench send --json"),
        experiment::<receive::ReceiveRow>("receive", "haul bench receive --json"),
        experiment::<forward::ForwardRow>("forward", "haul bench forward --json"),
        experiment::<profile::ProfileRow>("profile", "haul bench profile --json"),
        experiment::<interrupts::InterruptsRow>("interrupts", "haul bench interrupts --json"),
        experiment::<settings::SettingRow>("settings", "haul bench settings --json"),
        experiment::<loan::LoanRow>("loan", "haul bench loan --json"),
        experiment::<copies::CopiesRow>("copies", "haul bench copies --json"),
        experiment::<checksum::ChecksumRow>("checksum", "haul bench checksum --json"),
        document::<summary::Summary>("summary", "haul bench, in summary.json"),
        document::<haul::Plan>("plan", "haul plan, in haul-plan.json"),
        document::<compare::Comparison>("compare", "haul compare --json"),
        document::<SoakReport>("soak", "haul soak --json"),
        document::<soak_series::SoakSeries>("soak-series", "haul soak --runs --json"),
        document::<haul_run::RunReport>("run", "haul run --json"),
        document::<self_check::SelfCheck>("self-check", "haul soak --self-check --json"),
        document::<doctor::Diagnosis>("doctor", "haul doctor --json"),
        document::<Vec<haul_serve::JsonEntry<'static>>>(
            "serve-listing",
            "haul serve --listing, a directory",
        ),
        document::<haul_proxy::LogLine<'static>>("proxy-log", "haul proxy --access-log"),
        document::<haul_proxy::ControlResponse>("proxy-control", "haul proxy control --json"),
        document::<haul_serve::ControlResponse>("serve-control", "haul serve control --json"),
        document::<haul_serve::JsonLine<'static>>("serve-log", "haul serve --log-format json"),
        document::<haul_pairs::PairsReport>("fleet-bench", "haul fleet bench --json"),
        document::<TransferLine>(
            "transfer",
            "haul push, haul pull and haul fleet push with --json, each line",
        ),
    ]
}

/// The report of an experiment, whose name is a constant of the schema.
fn experiment<R: JsonSchema>(name: &'static str, source: &'static str) -> Document {
    let mut document = document::<Report<R>>(name, source);
    let description = format!("The result of the experiment {name}.");
    document.schema.insert("description".into(), description.into());
    if let Some(field) = document.schema.pointer_mut("/properties/experiment") {
        field["const"] = name.into();
    }
    document
}

fn document<T: JsonSchema>(name: &'static str, source: &'static str) -> Document {
    let settings = SchemaSettings::draft2020_12()
        .for_serialize()
        .with_transform(RecursiveTransform(plain_description));
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    if let Some(items) = schema.pointer("/items/$ref").and_then(Value::as_str) {
        let name = items.rsplit('/').next().unwrap_or_default();
        schema.insert("description".into(), format!("A list of `{name}`.").into());
    }
    schema.insert("title".into(), format!("haul {name}").into());
    schema.insert("$id".into(), format!("urn:haul:{name}:{}", version(&schema)).into());
    Document { name, source, schema }
}

/// The version of a contract, from its constant `haul.NAME/VERSION`; 1 for one without.
fn version(schema: &Schema) -> String {
    let name = schema.pointer("/properties/schema/const").and_then(Value::as_str);
    name.and_then(|name| name.rsplit_once('/')).map_or("1", |(_, version)| version).to_owned()
}

/// Turns a doc comment into a description of JSON: a paragraph is one line, links are only their
/// names, and `None` is `null`.
fn plain_description(schema: &mut Schema) {
    let Some(Value::String(text)) = schema.get_mut("description") else { return };
    let paragraphs = text.split("\n\n").map(|paragraph| paragraph.replace('\n', " "));
    *text = paragraphs.collect::<Vec<_>>().join("\n\n");
    let root = concat!("`crate", "::");
    for (rust, json) in [("[`", "`"), ("`]", "`"), (root, "`"), ("`None`", "`null`")] {
        *text = text.replace(rust, json);
    }
}

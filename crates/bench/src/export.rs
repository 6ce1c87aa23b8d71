//! Output formats of reports, one per file.

mod escape;
pub mod html;
pub mod markdown;
pub mod rounds;
pub mod summary;
pub mod svg;
pub mod terminal;

/// The JSON contract, indented, with a newline at its end.
pub fn json(report: &impl serde::Serialize) -> String {
    // Serialization fails only for maps whose keys are not text, which reports do not contain.
    serde_json::to_string_pretty(report).unwrap_or_default() + "\n"
}

//! Reports for people and programs, one form a file.

pub mod html;
pub mod markdown;
pub mod svg;
pub mod terminal;

/// The JSON contract, indented, with a newline at its end.
pub fn json(report: &impl serde::Serialize) -> String {
    // Reports hold no map with keys that are not text, the one thing that cannot be written.
    serde_json::to_string_pretty(report).unwrap_or_default() + "\n"
}

//! `haul bench copies`: the copies of each row are proved, and a share of sendfile's gain is stated
//! only if the gain was shown.

mod common {
    pub mod command;
    pub mod json;
    pub mod quiet;
    pub mod report;
    pub mod schema;
}

use common::command::haul;
use common::json::json;
use common::quiet::is_quiet;

#[test]
fn the_copies_of_each_row_are_proved() {
    if !is_quiet() {
        return;
    }
    let arguments = ["bench", "copies", "--rounds", "1", "--file", "1MiB", "--folios"];
    let arguments = [&arguments[..], &["small,huge", "--chunk", "64KiB", "--json", "-"]].concat();
    let report = json(&mut haul(&arguments));
    assert_eq!(report["experiment"], "copies");
    let rows = report["rows"].as_array().unwrap();
    let copies = [("read+write", 2), ("mapped+write", 1), ("sendfile-copied", 1), ("sendfile", 0)];
    for place in ["tmpfs", "tmpfs-huge"] {
        for (path, copies) in copies {
            let row = rows.iter().find(|row| row["path"] == path && row["place"] == place).unwrap();
            if let Some(reason) = row["refused"].as_str() {
                eprintln!("SKIPPED: {path}: {reason}");
                continue;
            }
            let lent = if copies == 0 { 16 } else { 0 };
            assert_eq!(row["lent_pages"].as_u64(), Some(lent), "{row}");
            assert_eq!(row["copies"].as_u64(), Some(copies), "{row}");
            assert!(row["kept"].is_null(), "one round shows no gain: {row}");
        }
    }
    let send = rows.iter().find(|row| row["path"] == "send").unwrap();
    assert_eq!((send["copies"].as_u64(), send["place"].as_str()), (Some(1), Some("")), "{send}");
}

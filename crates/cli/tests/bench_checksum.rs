//! `haul bench checksum`: the seven numbered rows, and the ratios to their references.

mod common {
    pub mod command;
    pub mod json;
    pub mod report;
    pub mod schema;
}

use common::command::haul;
use common::json::json;

#[test]
fn every_size_has_the_seven_numbered_rows() {
    let arguments = ["bench", "checksum", "--rounds", "2", "--size", "100B,64KiB", "--json", "-"];
    let report = json(&mut haul(&arguments));
    assert_eq!(report["experiment"], "checksum");
    assert!(report["lab"].is_null());
    let rows = report["rows"].as_array().unwrap();
    for bytes in [100, 65_536] {
        let of_size: Vec<_> = rows.iter().filter(|row| row["bytes"] == bytes).collect();
        let numbers: Vec<u64> = of_size.iter().filter_map(|row| row["number"].as_u64()).collect();
        assert_eq!(numbers, [1, 2, 3, 4, 5, 6, 7]);
        for row in of_size {
            assert_eq!(row["rounds"], 2);
            for field in
                ["ns_per_kib", "gigabytes_per_second", "read_bandwidth_share", "memcpy_ratio"]
            {
                assert!(row[field]["median"].as_f64().unwrap() > 0.0, "{field} of {row}");
            }
        }
    }
}

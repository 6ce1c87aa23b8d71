//! The built-in plan, used if there is no other.
//!
//! Measured on two virtual CPUs of an AMD EPYC, Linux 6.18.44, veth, MTU 9000, cubic, unpaced, on
//! 2026-11-22, by `haul plan`; docs/measurements/plan.md describes the measurement and its errors.
//! On other machines the figures differ. That methods which send pages are cheaper than those which
//! copy has held on all machines so far.
//!
//! A table and not a plan file, so that a program which reads no plan files needs no JSON. The
//! figures are rounded to four digits: their intervals are wider than that.

use super::{Condition, Cost, Network, Plan, Point, SourceKind, Spread};
use crate::method::SendMethod;
use std::sync::LazyLock;

static PLAN: LazyLock<Plan> = LazyLock::new(|| Plan {
    kernel: "6.18.44".into(),
    cpu: "AMD EPYC".into(),
    measured: "2026-11-22T16:45:07Z".into(),
    network: Some(Network {
        cache_line_round_trip_ns: Some(300.0),
        reading: Some("held".into()),
        ..Network::new("cubic", 9000)
    }),
    ..Plan::new(ROWS.iter().map(Row::cost).collect())
});

pub(super) fn plan() -> &'static Plan {
    &PLAN
}

/// A [`Cost`], as a constant.
struct Row {
    method: SendMethod,
    source: SourceKind,
    offloads: bool,
    us_per_call: Spread,
    us_per_mib: Spread,
    /// Each a size in bytes and the cost of all of it in µs.
    points: &'static [(u64, Spread)],
}

impl Row {
    fn cost(&self) -> Cost {
        let condition = Condition::new(self.source, self.offloads);
        let points = self.points.iter().map(|&(bytes, us)| Point { bytes, us });
        Cost {
            points: points.collect(),
            ..Cost::new(self.method, condition, self.us_per_call, self.us_per_mib)
        }
    }
}

const fn spread(median: f64, low: f64, high: f64) -> Spread {
    Spread { median, low, high }
}

const ROWS: &[Row] = &[
    Row {
        method: SendMethod::ReadWrite,
        source: SourceKind::File,
        offloads: false,
        us_per_call: spread(1.107, 1.107, 1.626),
        us_per_mib: spread(963.9, 805.4, 1208.0),
        points: &[(8_192, spread(8.637, 7.588, 11.07)), (262_144, spread(245.4, 206.5, 308.6))],
    },
    Row {
        method: SendMethod::ReadWrite,
        source: SourceKind::File,
        offloads: true,
        us_per_call: spread(1.743, 1.568, 2.764),
        us_per_mib: spread(537.0, 438.5, 658.8),
        points: &[
            (2_048, spread(2.731, 2.391, 3.984)),
            (8_192, spread(6.268, 5.11, 8.067)),
            (24_576, spread(14.52, 12.26, 19.36)),
            (65_536, spread(44.21, 30.23, 52.16)),
            (131_072, spread(68.45, 56.92, 81.86)),
            (262_144, spread(135.6, 120.5, 182.1)),
            (1_048_576, spread(511.1, 442.7, 644.5)),
            (25_165_824, spread(13440.0, 10620.0, 16150.0)),
        ],
    },
    Row {
        method: SendMethod::ReadWrite,
        source: SourceKind::Memory,
        offloads: false,
        us_per_call: spread(0.9108, 0.9108, 3.01),
        us_per_mib: spread(888.7, 688.9, 1015.0),
        points: &[
            (16_384, spread(14.8, 13.77, 17.98)),
            (16_777_216, spread(14450.0, 11790.0, 16780.0)),
        ],
    },
    Row {
        method: SendMethod::ReadWrite,
        source: SourceKind::Memory,
        offloads: true,
        us_per_call: spread(0.8832, 0.782, 0.8954),
        us_per_mib: spread(370.3, 297.0, 506.1),
        points: &[
            (2_048, spread(1.649, 1.478, 1.786)),
            (16_384, spread(5.952, 5.494, 8.255)),
            (65_536, spread(25.69, 19.29, 32.08)),
            (262_144, spread(95.59, 75.13, 122.4)),
            (1_048_576, spread(423.5, 339.1, 534.7)),
            (16_777_216, spread(5980.0, 4874.0, 9228.0)),
        ],
    },
    Row {
        method: SendMethod::ReadSend,
        source: SourceKind::File,
        offloads: false,
        us_per_call: spread(1.399, 1.367, 1.637),
        us_per_mib: spread(973.2, 825.6, 1194.0),
        points: &[(8_192, spread(9.002, 8.087, 10.7)), (262_144, spread(248.9, 212.9, 304.0))],
    },
    Row {
        method: SendMethod::ReadSend,
        source: SourceKind::File,
        offloads: true,
        us_per_call: spread(1.532, 1.306, 2.101),
        us_per_mib: spread(574.6, 483.2, 708.9),
        points: &[
            (2_048, spread(2.49, 2.159, 3.261)),
            (8_192, spread(7.277, 5.818, 9.569)),
            (24_576, spread(17.31, 12.57, 19.97)),
            (65_536, spread(37.24, 31.99, 46.97)),
            (131_072, spread(75.12, 61.73, 90.07)),
            (262_144, spread(133.0, 121.7, 172.8)),
            (1_048_576, spread(535.8, 492.8, 731.6)),
            (25_165_824, spread(15930.0, 12150.0, 17280.0)),
        ],
    },
    Row {
        method: SendMethod::ReadSend,
        source: SourceKind::Memory,
        offloads: false,
        us_per_call: spread(1.368, 1.331, 3.195),
        us_per_mib: spread(852.4, 606.9, 1006.0),
        points: &[
            (16_384, spread(14.69, 12.68, 17.05)),
            (16_777_216, spread(13990.0, 10530.0, 16440.0)),
        ],
    },
    Row {
        method: SendMethod::ReadSend,
        source: SourceKind::Memory,
        offloads: true,
        us_per_call: spread(0.7578, 0.7578, 1.111),
        us_per_mib: spread(377.8, 287.9, 481.9),
        points: &[
            (2_048, spread(1.524, 1.316, 2.077)),
            (16_384, spread(6.083, 5.526, 8.147)),
            (65_536, spread(21.68, 18.45, 27.38)),
            (262_144, spread(107.4, 74.73, 142.3)),
            (1_048_576, spread(449.8, 305.7, 490.1)),
            (16_777_216, spread(6410.0, 4654.0, 9382.0)),
        ],
    },
    Row {
        method: SendMethod::MmapSend,
        source: SourceKind::File,
        offloads: false,
        us_per_call: spread(7.849, 7.037, 10.22),
        us_per_mib: spread(1072.0, 892.8, 1414.0),
        points: &[(8_192, spread(16.22, 14.01, 21.27)), (262_144, spread(275.8, 230.2, 363.7))],
    },
    Row {
        method: SendMethod::MmapSend,
        source: SourceKind::File,
        offloads: true,
        us_per_call: spread(7.658, 1.163, 12.67),
        us_per_mib: spread(548.5, 496.4, 590.8),
        points: &[
            (2_048, spread(9.063, 1.894, 16.74)),
            (8_192, spread(11.82, 10.94, 15.31)),
            (24_576, spread(18.96, 15.92, 24.61)),
            (65_536, spread(43.38, 38.78, 49.57)),
            (131_072, spread(79.73, 67.9, 94.8)),
            (262_144, spread(141.6, 132.7, 172.1)),
            (1_048_576, spread(655.3, 464.1, 701.0)),
            (25_165_824, spread(12080.0, 8953.0, 12560.0)),
        ],
    },
    Row {
        method: SendMethod::Sendfile,
        source: SourceKind::File,
        offloads: false,
        us_per_call: spread(2.06, 1.539, 3.804),
        us_per_mib: spread(753.6, 664.0, 928.8),
        points: &[(8_192, spread(7.948, 6.727, 11.06)), (262_144, spread(190.5, 167.6, 236.0))],
    },
    Row {
        method: SendMethod::Sendfile,
        source: SourceKind::File,
        offloads: true,
        us_per_call: spread(1.896, 1.602, 2.351),
        us_per_mib: spread(176.2, 162.9, 223.3),
        points: &[
            (2_048, spread(2.301, 1.967, 3.477)),
            (8_192, spread(3.366, 2.89, 3.708)),
            (24_576, spread(5.714, 5.248, 6.518)),
            (65_536, spread(11.58, 10.82, 14.95)),
            (131_072, spread(22.36, 21.26, 30.23)),
            (262_144, spread(51.2, 46.05, 64.62)),
            (1_048_576, spread(189.5, 165.7, 242.9)),
            (25_165_824, spread(4553.0, 4199.0, 6021.0)),
        ],
    },
    Row {
        method: SendMethod::Sendfile,
        source: SourceKind::Memory,
        offloads: false,
        us_per_call: spread(0.8448, 0.0, 2.799),
        us_per_mib: spread(807.1, 734.1, 844.0),
        points: &[
            (16_384, spread(13.45, 11.26, 15.99)),
            (16_777_216, spread(12930.0, 11980.0, 13550.0)),
        ],
    },
    Row {
        method: SendMethod::Sendfile,
        source: SourceKind::Memory,
        offloads: true,
        us_per_call: spread(1.663, 1.333, 2.087),
        us_per_mib: spread(183.2, 174.4, 212.4),
        points: &[
            (2_048, spread(2.254, 1.783, 2.549)),
            (16_384, spread(3.838, 3.633, 5.43)),
            (65_536, spread(13.13, 11.75, 14.0)),
            (262_144, spread(47.35, 46.03, 50.19)),
            (1_048_576, spread(194.7, 185.1, 264.7)),
            (16_777_216, spread(3206.0, 2950.0, 3582.0)),
        ],
    },
    Row {
        method: SendMethod::Splice,
        source: SourceKind::File,
        offloads: false,
        us_per_call: spread(4.301, 2.741, 5.605),
        us_per_mib: spread(645.6, 588.7, 715.1),
        points: &[(8_192, spread(9.345, 7.34, 11.19)), (262_144, spread(165.7, 149.9, 184.4))],
    },
    Row {
        method: SendMethod::Splice,
        source: SourceKind::File,
        offloads: true,
        us_per_call: spread(2.32, 2.114, 2.614),
        us_per_mib: spread(174.8, 163.4, 213.0),
        points: &[
            (2_048, spread(2.829, 2.572, 3.024)),
            (8_192, spread(3.56, 3.322, 4.146)),
            (24_576, spread(6.345, 5.678, 8.011)),
            (65_536, spread(12.13, 11.57, 17.53)),
            (131_072, spread(22.07, 21.04, 26.08)),
            (262_144, spread(51.8, 47.17, 62.1)),
            (1_048_576, spread(187.6, 177.6, 211.3)),
            (25_165_824, spread(4465.0, 4052.0, 5027.0)),
        ],
    },
    Row {
        method: SendMethod::Splice,
        source: SourceKind::Memory,
        offloads: false,
        us_per_call: spread(3.108, 2.405, 3.619),
        us_per_mib: spread(672.8, 627.2, 834.0),
        points: &[
            (16_384, spread(13.62, 12.21, 16.65)),
            (16_777_216, spread(10810.0, 10070.0, 13400.0)),
        ],
    },
    Row {
        method: SendMethod::Splice,
        source: SourceKind::Memory,
        offloads: true,
        us_per_call: spread(2.05, 1.871, 2.299),
        us_per_mib: spread(179.4, 168.2, 232.3),
        points: &[
            (2_048, spread(2.712, 2.401, 2.963)),
            (16_384, spread(4.231, 4.044, 5.566)),
            (65_536, spread(11.83, 11.25, 13.94)),
            (262_144, spread(52.75, 46.92, 70.47)),
            (1_048_576, spread(189.1, 181.6, 248.6)),
            (16_777_216, spread(3123.0, 2839.0, 4100.0)),
        ],
    },
    Row {
        method: SendMethod::Vmsplice,
        source: SourceKind::File,
        offloads: false,
        us_per_call: spread(7.159, 7.062, 10.5),
        us_per_mib: spread(1004.0, 755.8, 1143.0),
        points: &[(8_192, spread(15.0, 12.97, 19.43)), (262_144, spread(258.1, 196.0, 296.3))],
    },
    Row {
        method: SendMethod::Vmsplice,
        source: SourceKind::File,
        offloads: true,
        us_per_call: spread(10.79, 8.906, 12.97),
        us_per_mib: spread(268.5, 255.5, 305.6),
        points: &[
            (2_048, spread(12.84, 12.22, 15.05)),
            (8_192, spread(12.45, 9.763, 13.17)),
            (24_576, spread(14.98, 13.7, 21.19)),
            (65_536, spread(31.11, 24.25, 35.91)),
            (131_072, spread(43.03, 41.43, 57.24)),
            (262_144, spread(77.34, 72.4, 82.6)),
            (1_048_576, spread(287.6, 278.2, 305.8)),
            (25_165_824, spread(6719.0, 6468.0, 7639.0)),
        ],
    },
    Row {
        method: SendMethod::Vmsplice,
        source: SourceKind::Memory,
        offloads: false,
        us_per_call: spread(1.116, 0.6019, 1.445),
        us_per_mib: spread(735.8, 650.3, 826.6),
        points: &[
            (16_384, spread(12.61, 10.76, 14.36)),
            (16_777_216, spread(11790.0, 10420.0, 13250.0)),
        ],
    },
    Row {
        method: SendMethod::Vmsplice,
        source: SourceKind::Memory,
        offloads: true,
        us_per_call: spread(1.824, 1.59, 2.223),
        us_per_mib: spread(161.4, 152.4, 185.6),
        points: &[
            (2_048, spread(2.352, 2.083, 2.637)),
            (16_384, spread(3.911, 3.525, 5.624)),
            (65_536, spread(10.55, 9.968, 10.92)),
            (262_144, spread(44.74, 43.4, 48.45)),
            (1_048_576, spread(177.8, 169.0, 204.0)),
            (16_777_216, spread(2781.0, 2537.0, 3819.0)),
        ],
    },
];

//! The cost of a row in each round, as reports keep it: to pool reports and to compare them.

use super::Series;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The cost of a row in one round.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct RoundCost {
    /// The round. Rows of one report were measured within seconds of each other in the rounds of
    /// the same number.
    pub round: usize,
    /// The cost by which the rows are compared, in the unit of the experiment: CPU time of the
    /// sending or receiving host or of the forwarder in µs per MiB, per message or per 1000
    /// packets; for settings the CPU time of both hosts; for checksums ns per KiB.
    pub cost: f64,
    /// The other host's cost in the same unit; `null` if it was not measured.
    #[serde(default)]
    pub other_host_cost: Option<f64>,
    /// Whether the hosts' CPUs were at another distance than in most rounds. Such a round counts
    /// for ratios only.
    #[serde(default)]
    pub is_at_other_distance: bool,
}

impl<C, R> Series<C, R> {
    /// The costs of all rounds in which bytes or packets were moved, in the order of the rounds. A
    /// cost per packet does not exist in a round without a packet.
    pub(crate) fn round_costs(
        &self,
        cost: impl Fn(&R) -> f64,
        other_host_cost: impl Fn(&R) -> Option<f64>,
    ) -> Vec<RoundCost> {
        let at = |rounds: &[(usize, R)], is_at_other_distance| -> Vec<RoundCost> {
            let round_cost = |(round, value): &(usize, R)| RoundCost {
                round: *round,
                cost: cost(value),
                other_host_cost: other_host_cost(value).filter(|cost| cost.is_finite()),
                is_at_other_distance,
            };
            rounds.iter().map(round_cost).filter(|one| one.cost.is_finite()).collect()
        };
        let mut costs = at(&self.rounds, false);
        costs.extend(at(&self.rounds_at_other_distance, true));
        costs.sort_by_key(|cost| cost.round);
        costs
    }
}

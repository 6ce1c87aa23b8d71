//! What differs between the hosts: a slow link, a slow host, another MTU or congestion control.

use crate::report::{Findings, HostRow, PairRow};
use std::collections::BTreeMap;

/// A pair is slow below this share of the median of all pairs.
pub const SLOW_SHARE: f64 = 0.5;
/// A host is named if at least this share of its pairs in one direction is slow.
const HOST_SHARE: f64 = 0.75;
/// With fewer hosts, a slow pair does not show which of its hosts is slow.
const HOSTS_MIN: usize = 3;

impl Findings {
    /// The findings about these hosts and pairs.
    pub fn of(hosts: &[HostRow], pairs: &[PairRow]) -> Self {
        let mut findings = Self::default();
        let lost = findings.add_lost(hosts, pairs);
        findings.add_slow(hosts, pairs, &lost);
        findings.add_others(hosts, |host| host.mtu.map(|mtu| mtu.to_string()), "MTU");
        findings.add_others(hosts, |host| host.congestion.clone(), "congestion control");
        findings
    }

    fn add(&mut self, hosts: &[usize], sentence: String) {
        self.sentences.push(sentence);
        self.hosts.extend(hosts);
        self.hosts.sort_unstable();
        self.hosts.dedup();
    }

    /// Adds pairs that could not be measured. Returns the hosts of which no pair could.
    fn add_lost(&mut self, hosts: &[HostRow], pairs: &[PairRow]) -> Vec<usize> {
        let is_lost = |pair: &&PairRow| pair.bytes_per_s.is_none();
        let of =
            |host: usize| pairs.iter().filter(move |pair| pair.from == host || pair.to == host);
        let lost: Vec<_> = (0..hosts.len())
            .filter(|&host| of(host).count() > 0 && of(host).all(|pair| is_lost(&pair)))
            .collect();
        for &host in &lost {
            let problem = of(host).find_map(|pair| pair.problem.clone()).unwrap_or_default();
            let name = &hosts[host].name;
            self.add(&[host], format!("{name} could not be measured with any host: {problem}"));
        }
        for pair in pairs.iter().filter(is_lost) {
            if !lost.contains(&pair.from) && !lost.contains(&pair.to) {
                let (from, to) = (&hosts[pair.from].name, &hosts[pair.to].name);
                let problem = pair.problem.clone().unwrap_or_default();
                self.add(&[pair.from, pair.to], format!("{from} cannot send to {to}: {problem}"));
            }
        }
        lost
    }

    fn add_slow(&mut self, hosts: &[HostRow], pairs: &[PairRow], lost: &[usize]) {
        if hosts.len() - lost.len() < HOSTS_MIN {
            return;
        }
        let Some(median) = median(pairs.iter().filter_map(|pair| pair.bytes_per_s)) else { return };
        let is_slow =
            |pair: &&PairRow| pair.bytes_per_s.is_some_and(|rate| rate < SLOW_SHARE * median);
        let share = |chosen: &dyn Fn(&PairRow) -> bool| {
            let measured = || pairs.iter().filter(|one| chosen(one) && one.bytes_per_s.is_some());
            let slow = measured().filter(is_slow).count();
            slow as f64 / measured().count().max(1) as f64 >= HOST_SHARE
        };
        let rate = |chosen: &dyn Fn(&PairRow) -> bool| {
            let chosen = pairs.iter().filter(|one| chosen(one)).filter_map(|one| one.bytes_per_s);
            rate_text(self::median(chosen).unwrap_or(0.0))
        };
        let (mut receives, mut sends) = (Vec::new(), Vec::new());
        for (host, HostRow { name, .. }) in hosts.iter().enumerate() {
            let (into, out) = (|one: &PairRow| one.to == host, |one: &PairRow| one.from == host);
            let usual = rate_text(median);
            let sentence = match (share(&into), share(&out)) {
                (true, true) => format!(
                    "{name} is slow: it receives {} and sends {}, where others reach {usual}",
                    rate(&into),
                    rate(&out)
                ),
                (true, false) => format!(
                    "the link to {name} is slow: {name} receives {}, where others receive {usual}",
                    rate(&into)
                ),
                (false, true) => format!(
                    "the link from {name} is slow: {name} sends {}, where others send {usual}",
                    rate(&out)
                ),
                (false, false) => continue,
            };
            if share(&into) {
                receives.push(host);
            }
            if share(&out) {
                sends.push(host);
            }
            self.add(&[host], sentence);
        }
        for pair in pairs.iter().filter(is_slow) {
            if !receives.contains(&pair.to) && !sends.contains(&pair.from) {
                let (from, to) = (&hosts[pair.from].name, &hosts[pair.to].name);
                let (rate, usual) = (rate_text(pair.bytes_per_s.unwrap_or(0.0)), rate_text(median));
                let sentence = format!("{from} sends {rate} to {to}, where others send {usual}");
                self.add(&[pair.from, pair.to], sentence);
            }
        }
    }

    /// Adds hosts with another value than most hosts.
    fn add_others(
        &mut self,
        hosts: &[HostRow],
        value: impl Fn(&HostRow) -> Option<String>,
        what: &str,
    ) {
        let mut counts = BTreeMap::<String, usize>::new();
        for value in hosts.iter().filter_map(&value) {
            *counts.entry(value).or_default() += 1;
        }
        let Some((usual, count)) = counts.iter().max_by_key(|(_, count)| **count) else { return };
        if 2 * count <= counts.values().sum::<usize>() {
            if counts.len() > 1 {
                let values: Vec<_> = counts.keys().map(String::as_str).collect();
                self.add(&[], format!("the hosts have different {what}s: {}", values.join(", ")));
            }
            return;
        }
        for (at, host) in hosts.iter().enumerate() {
            if let Some(own) = value(host).filter(|own| own != usual) {
                let name = &host.name;
                self.add(&[at], format!("{name} has the {what} {own}, where others have {usual}"));
            }
        }
    }
}

/// The median; `None` of nothing.
pub fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// A rate in MiB per second.
pub fn rate_text(bytes_per_s: f64) -> String {
    let mib = bytes_per_s / f64::from(1 << 20);
    if mib < 10.0 { format!("{mib:.1} MiB/s") } else { format!("{mib:.0} MiB/s") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hosts(count: usize) -> Vec<HostRow> {
        let host = |number| HostRow {
            name: format!("h{number}"),
            mtu: Some(1500),
            congestion: Some("cubic".to_owned()),
            ..HostRow::default()
        };
        (0..count).map(host).collect()
    }

    fn pairs(count: usize, rate: impl Fn(usize, usize) -> Option<f64>) -> Vec<PairRow> {
        let all = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        all.filter(|(from, to)| from != to)
            .map(|(from, to)| {
                let bytes_per_s = rate(from, to).map(|mib| mib * f64::from(1 << 20));
                let problem = bytes_per_s.is_none().then(|| "no route".to_owned());
                PairRow { from, to, bytes_per_s, problem, ..PairRow::default() }
            })
            .collect()
    }

    fn sentences(hosts: &[HostRow], pairs: &[PairRow]) -> Vec<String> {
        Findings::of(hosts, pairs).sentences
    }

    #[test]
    fn a_slow_host_a_slow_link_and_a_slow_pair_are_told_apart() {
        let find =
            |rate: &dyn Fn(usize, usize) -> Option<f64>| sentences(&hosts(8), &pairs(8, rate));
        assert_eq!(
            find(&|from, to| Some(if from == 3 || to == 3 { 11.5 } else { 110.0 })),
            ["h3 is slow: it receives 12 MiB/s and sends 12 MiB/s, where others reach 110 MiB/s"]
        );
        assert_eq!(
            find(&|_, to| Some(if to == 2 { 5.25 } else { 110.0 })),
            ["the link to h2 is slow: h2 receives 5.2 MiB/s, where others receive 110 MiB/s"]
        );
        assert_eq!(
            find(&|from, _| Some(if from == 2 { 5.0 } else { 110.0 })),
            ["the link from h2 is slow: h2 sends 5.0 MiB/s, where others send 110 MiB/s"]
        );
        assert_eq!(
            find(&|from, to| Some(if (from, to) == (1, 4) { 20.0 } else { 110.0 })),
            ["h1 sends 20 MiB/s to h4, where others send 110 MiB/s"]
        );
        assert_eq!(
            find(&|from, to| (from != 6 && to != 6).then_some(110.0)),
            ["h6 could not be measured with any host: no route"]
        );
        assert_eq!(
            find(&|from, to| ((from, to) != (6, 5)).then_some(110.0)),
            ["h6 cannot send to h5: no route"]
        );
    }

    #[test]
    fn another_mtu_and_another_congestion_control_are_named() {
        let (mut hosts, pairs) = (hosts(4), pairs(4, |_, _| Some(100.0)));
        hosts[1].mtu = Some(9000);
        hosts[2].congestion = Some("bbr".to_owned());
        assert_eq!(
            sentences(&hosts, &pairs),
            [
                "h1 has the MTU 9000, where others have 1500",
                "h2 has the congestion control bbr, where others have cubic"
            ]
        );
        hosts[2].mtu = Some(9000);
        assert!(sentences(&hosts, &pairs)[0].contains("different MTUs: 1500, 9000"));
    }

    proptest! {
        #[test]
        fn hosts_that_differ_little_are_not_named(
            count in 0_usize..10,
            rates in prop::collection::vec(70.0..130.0_f64, 100),
        ) {
            let pairs = pairs(count, |from, to| Some(rates[from * 10 + to]));
            prop_assert_eq!(sentences(&hosts(count), &pairs), Vec::<String>::new());
        }
    }
}

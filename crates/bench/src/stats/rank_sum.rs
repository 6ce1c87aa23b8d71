//! The ratio of two independent samples: the Hodges–Lehmann estimate with the interval of the
//! rank-sum test (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, sections 4.2 and
//! 4.3).
//!
//! The estimate is the median of all quotients of a value of one sample and a value of the other.
//! The values may have any distribution, if both samples have the same distribution apart from the
//! ratio. If the values vary like normal values, the interval is four fifths as wide as the
//! interval of a quotient of two medians.

use super::{CONFIDENCE, Estimate, median, normal_quantile};

/// The ratio of `numerators` to `denominators`, which must be positive. `None` if a sample is
/// empty. `deviation_factor` is 1 for independent values. It is above 1 if neighbouring values
/// resemble each other, so that a sample holds less information than its size suggests.
pub fn ratio(numerators: &[f64], denominators: &[f64], deviation_factor: f64) -> Option<Estimate> {
    let mut quotients: Vec<f64> = numerators
        .iter()
        .flat_map(|one| denominators.iter().map(move |other| one / other))
        .collect();
    if quotients.is_empty() || !quotients.iter().all(|quotient| quotient.is_finite()) {
        return None;
    }
    let median = median(&mut quotients);
    let (count, others) = (numerators.len() as f64, denominators.len() as f64);
    // The rank sum is close to normal from eight values on.
    let deviation = deviation_factor * (count * others * (count + others + 1.0) / 12.0).sqrt();
    let rank = (count * others / 2.0 - normal_quantile(1) * deviation).floor();
    let rounds = numerators.len().min(denominators.len());
    if rank < 1.0 {
        return Some(Estimate::without_interval(median, rounds));
    }
    let rank = rank as usize;
    Some(Estimate {
        median,
        low: quotients[rank - 1],
        high: quotients[quotients.len() - rank],
        rounds,
        coverage_percent: 100.0 * CONFIDENCE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_of_a_sample_to_itself_is_one() {
        let sample: Vec<f64> = (0..12).map(|value| 10.0 + f64::from(value)).collect();
        let estimate = ratio(&sample, &sample, 1.0).unwrap();
        assert!((estimate.median - 1.0).abs() < 1e-9, "{estimate:?}");
        assert!(estimate.low < 1.0 && estimate.high > 1.0, "{estimate:?}");
        assert!(!ratio(&sample[..2], &sample[..2], 1.0).unwrap().has_interval());
        assert_eq!(ratio(&sample, &[], 1.0), None);
        assert_eq!(ratio(&sample, &[0.0], 1.0), None);
    }

    /// The interval contains the true ratio as often as it states, for skewed values too.
    #[test]
    fn the_interval_has_the_stated_coverage() {
        const SAMPLES: usize = 2000;
        const RATIO: f64 = 1.1;
        let mut random = fastrand::Rng::with_seed(3);
        for (count, others) in [(9, 9), (10, 50), (50, 50)] {
            let mut sample = |count: usize, factor: f64| -> Vec<f64> {
                (0..count).map(|_| factor * (0.2 * -random.f64().ln()).exp()).collect()
            };
            let held = (0..SAMPLES).filter(|_| {
                let estimate = ratio(&sample(count, RATIO), &sample(others, 1.0), 1.0).unwrap();
                (estimate.low..=estimate.high).contains(&RATIO)
            });
            let percent = 100.0 * held.count() as f64 / SAMPLES as f64;
            assert!((94.0..97.5).contains(&percent), "{count} and {others}: {percent} %");
        }
    }
}

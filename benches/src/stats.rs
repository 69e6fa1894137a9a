//! Medians.

/// Returns the median; 0 if there are no samples. Sorts `samples`.
pub fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    let middle = samples.len() / 2;
    match samples {
        [] => 0.0,
        _ if samples.len() % 2 == 1 => samples[middle],
        _ => f64::midpoint(samples[middle - 1], samples[middle]),
    }
}

/// Returns the smallest sample that is at least as large as this share of the samples. Sorts
/// `samples`.
pub fn percentile(samples: &mut [f64], share: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "a share of a number of samples"
    )]
    let index = (samples.len() as f64 * share) as usize;
    samples
        .get(index.min(samples.len().saturating_sub(1)))
        .copied()
        .unwrap_or_default()
}

/// Returns half the distance between the quartiles, as a share of the median. It shows how much
/// rounds differ.
pub fn spread(samples: &mut [f64]) -> f64 {
    let middle = median(samples);
    let (low, high) = (samples.len() / 4, samples.len() * 3 / 4);
    match (
        samples.get(low),
        samples.get(high.min(samples.len().saturating_sub(1))),
    ) {
        (Some(low), Some(high)) if middle != 0.0 => (high - low) / 2.0 / middle,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert!((median(&mut [3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(&mut [4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median(&mut []).abs() < 1e-9);
    }

    #[test]
    fn percentiles() {
        let mut samples: Vec<f64> = (0..200).rev().map(f64::from).collect();
        assert!((percentile(&mut samples, 0.99) - 198.0).abs() < 1e-9);
        assert!((percentile(&mut samples, 1.0) - 199.0).abs() < 1e-9);
        assert!(percentile(&mut [], 0.5).abs() < 1e-9);
    }

    #[test]
    fn spreads() {
        assert!(spread(&mut [5.0; 9]).abs() < 1e-9);
        let mut samples: Vec<f64> = (1..=9).map(f64::from).collect();
        assert!((spread(&mut samples) - 0.4).abs() < 1e-9);
    }
}

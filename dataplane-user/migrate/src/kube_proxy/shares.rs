//! Computes the weights of endpoints from the probabilities of rules that are evaluated one after the other.

/// The precision with which the kernel stores a probability.
const GRAIN: f64 = 1.0 / 2_147_483_648.0;
/// The maximum sum of weights in the search for exact weights. If none are found, the sum is about a million.
const SUM: u32 = 1000;

/// Returns the weights of endpoints whose rules are evaluated in this order with these probabilities. The last endpoint
/// has no probability, because it gets the rest. All weights are 1 if kube-proxy gave the endpoints equal shares.
///
/// Returns `None` if a probability is not between 0 and 1.
pub fn weights(probabilities: &[f64]) -> Option<Vec<u32>> {
    if probabilities.iter().any(|p| !(*p > 0.0 && *p < 1.0)) {
        return None;
    }
    let count = u32::try_from(probabilities.len()).ok()? + 1;
    let left = (2..=count).rev();
    let is_equal = |(p, left): (&f64, u32)| (p - 1.0 / f64::from(left)).abs() <= GRAIN;
    if probabilities.iter().zip(left).all(is_equal) {
        return Some(vec![1; count as usize]);
    }
    let mut rest = 1.0;
    let parts: Vec<f64> = (probabilities.iter().chain([&1.0]))
        .map(|p| {
            let part = rest * p;
            rest -= part;
            part
        })
        .collect();
    // The error adds up to one grain for each rule.
    let close = GRAIN * f64::from(count);
    let rounded = |sum: u32| {
        parts
            .iter()
            .map(move |part| (part * f64::from(sum)).round())
    };
    let exact = (1..=SUM).find(|sum| {
        parts
            .iter()
            .zip(rounded(*sum))
            .all(|(part, weight)| weight >= 1.0 && (weight / f64::from(*sum) - part).abs() <= close)
    });
    // A weight is at least 1, and at most the sum.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 1 and the sum"
    )]
    let weights = rounded(exact.unwrap_or(1_000_000)).map(|weight| weight.max(1.0) as u32);
    Some(weights.collect())
}

#[cfg(test)]
mod tests {
    use super::weights;

    #[test]
    fn what_the_kernel_rounds_is_uniform() {
        // In the form that `iptables-save` prints.
        for (probabilities, wanted) in [
            (&[][..], &[1][..]),
            (&[0.5], &[1, 1]),
            (&[0.333_333_333_49, 0.5], &[1, 1, 1]),
            (
                &[
                    0.142_857_142_72,
                    0.166_666_666_51,
                    0.2,
                    0.25,
                    0.333_333_333_49,
                    0.5,
                ],
                &[1; 7],
            ),
            (&[0.75], &[3, 1]),
            (&[0.6, 0.5], &[3, 1, 1]),
            (&[0.333_333_333_49], &[1, 2]),
        ] {
            assert_eq!(weights(probabilities).unwrap(), wanted, "{probabilities:?}");
        }
    }

    #[test]
    fn what_is_no_probability_has_no_weights() {
        for probability in [0.0, 1.0, -0.5, 1.5, f64::NAN] {
            assert_eq!(weights(&[probability]), None, "{probability}");
        }
        let odd = weights(&[0.123_456_789]).unwrap();
        assert_eq!(odd, [123_457, 876_543]);
    }
}

//! Weights of endpoints, as repeated places in a list from which one is drawn.

/// The maximum number of places in one list: a block of the kernel's table ENDPOINTS has no more slots.
const MOST: u64 = u16::MAX as u64;
/// Every list may have this many places, even for two endpoints with any weights.
const AT_LEAST: u64 = 1024;
/// Places per endpoint in lists that may be longer than [`AT_LEAST`]. A weight that is too small for a place still
/// gets one. With this many places per endpoint, such places take at most a hundredth of the list.
const FOR_EACH: u64 = 128;

/// The weights of a port's endpoints, in the same order: at least 1 each. An endpoint gets its weight's part of the
/// sum of all that may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights(Vec<u32>);

impl Weights {
    /// Of endpoints in their order; 0 counts as 1. None if all weights are equal.
    pub fn of(weights: Vec<u32>) -> Option<Box<Self>> {
        let first = weights.first()?.max(&1);
        let equal = weights.iter().all(|weight| weight.max(&1) == first);
        (!equal).then(|| Box::new(Self(weights)))
    }

    /// Returns the weight of the endpoint at an index.
    pub fn get(&self, index: usize) -> u32 {
        self.0.get(index).copied().unwrap_or(1).max(1)
    }

    /// Endpoints, each as often as its weight asks: see `places`.
    pub fn repeated<T: Copy>(weighted: &[(T, u32)]) -> impl Iterator<Item = T> {
        let weights: Vec<u32> = weighted.iter().map(|(_, weight)| *weight).collect();
        let all = weighted.iter().zip(places(&weights));
        all.flat_map(|((endpoint, _), places)| std::iter::repeat_n(*endpoint, places as usize))
    }
}

/// How many places each of some weights gets in a list: proportional to the weights, and as few as that takes. If the
/// exact list is too long, no part differs from the exact one by more than a hundredth of the list, and each weight has
/// a place.
pub fn places(weights: &[u32]) -> Vec<u32> {
    let weights: Vec<u64> = weights
        .iter()
        .map(|weight| u64::from(*weight).max(1))
        .collect();
    let divisor = weights.iter().copied().fold(0, gcd).max(1);
    let sum = weights.iter().sum::<u64>() / divisor;
    let most = bound(weights.len());
    if sum <= most {
        let exact = weights.iter().map(|weight| weight / divisor);
        return exact.map(count).collect();
    }
    // Whole places of each exact part, one at least, and then those that are left to the largest remainders.
    let sum = sum * divisor;
    let part = |weight: u64| u128::from(weight) * u128::from(most);
    let mut places: Vec<u64> = weights
        .iter()
        .map(|weight| narrow(part(*weight) / u128::from(sum)).max(1))
        .collect();
    let mut left = most.saturating_sub(places.iter().sum());
    let mut order: Vec<usize> = (0..weights.len()).collect();
    let remainder = |index: &usize| part(weights[*index]) % u128::from(sum);
    order.sort_by_key(|index| std::cmp::Reverse(remainder(index)));
    for index in order {
        if left == 0 {
            break;
        }
        // A weight that has one place for less than one has its due.
        if part(weights[index]) >= u128::from(sum) {
            places[index] += 1;
            left -= 1;
        }
    }
    // Weights that got a place for less than one took it from the largest.
    let mut over = places.iter().sum::<u64>().saturating_sub(most);
    while over > 0 {
        let Some(largest) = places.iter_mut().max() else {
            break;
        };
        if *largest == 1 {
            break;
        }
        let less = over.min(*largest - 1).min(1 + *largest / 64);
        *largest -= less;
        over -= less;
    }
    places.into_iter().map(count).collect()
}

/// Returns the most places that a list can have for any selection of these weights. A budget counts this number.
pub fn most_places(weights: &[u32]) -> usize {
    let divisor = weights.iter().copied().map(u64::from).fold(0, gcd).max(1);
    let sum = weights.iter().map(|weight| u64::from(*weight)).sum::<u64>() / divisor;
    usize::try_from(sum.min(bound(weights.len()))).unwrap_or(usize::MAX)
}

/// The longest list for so many endpoints.
fn bound(endpoints: usize) -> u64 {
    (endpoints as u64)
        .saturating_mul(FOR_EACH)
        .clamp(AT_LEAST, MOST)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn narrow(places: u128) -> u64 {
    u64::try_from(places).unwrap_or(MOST)
}

fn count(places: u64) -> u32 {
    u32::try_from(places).unwrap_or(u32::MAX)
}

/// Weights as numbers of 32 bits, in lowest terms: rounded if they must be, and then none of them to 0. The sum of any
/// `addends` of them is such a number, too.
pub fn narrowed(weights: &[u128], addends: usize) -> Vec<u32> {
    let most = u32::MAX / u32::try_from(addends).unwrap_or(u32::MAX).max(1);
    let divisor = weights.iter().copied().fold(0, gcd128).max(1);
    let largest = weights.iter().max().copied().unwrap_or_default() / divisor;
    let scale = largest / u128::from(most) + 1;
    let weights = weights.iter().map(|weight| weight / divisor);
    let least = |weight: u128| u128::from(weight > 0);
    weights
        .map(|weight| u32::try_from((weight / scale).max(least(weight))).unwrap_or(u32::MAX))
        .collect()
}

/// The least common multiple, or if that is too large to count with, a number that is large beside both.
pub fn lcm(a: u128, b: u128) -> u128 {
    let least = (a / gcd128(a, b).max(1)).checked_mul(b);
    least
        .filter(|least| *least < 1 << 96)
        .unwrap_or(a.max(1 << 72))
}

fn gcd128(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd128(b, a % b) }
}

/// The most places that so many endpoints take which get parts by these weights, each times a divisor of `common` if that
/// is known.
pub(super) fn most_places_of(weights: &[u32], endpoints: usize, common: Option<u128>) -> usize {
    let divisor = weights.iter().copied().map(u64::from).fold(0, gcd).max(1);
    let sum = weights.iter().map(|weight| u64::from(*weight)).sum::<u64>() / divisor;
    let exact = common.map(|common| common.saturating_mul(u128::from(sum)));
    let exact = exact.and_then(|exact| u64::try_from(exact).ok());
    let most = exact.unwrap_or(u64::MAX).min(bound(endpoints));
    usize::try_from(most).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn weights_are_reduced_to_the_shortest_list() {
        for (weights, wanted) in [
            (&[][..], &[][..]),
            (&[7], &[1]),
            (&[5, 5], &[1, 1]),
            (&[90, 10], &[9, 1]),
            (&[0, 3], &[1, 3]),
            (&[600, 400, 200], &[3, 2, 1]),
            (&[1023, 1], &[1023, 1]),
        ] {
            assert_eq!(places(weights), wanted, "{weights:?}");
        }
        assert_eq!(places(&[1, u32::MAX]), [1, 1023]);
        assert_eq!(places(&[u32::MAX, u32::MAX - 1]), [512, 512]);
    }

    #[test]
    fn equal_weights_are_none() {
        assert_eq!(Weights::of(vec![3, 3, 3]), None);
        assert_eq!(Weights::of(vec![0, 1]), None);
        assert_eq!(Weights::of(Vec::new()), None);
        assert_eq!(Weights::of(vec![1, 2]).unwrap().get(1), 2);
    }

    proptest! {
        /// However the weights are, each endpoint is drawn in its part of all draws, to a hundredth.
        #[test]
        fn every_part_is_right_to_a_hundredth(
            weights in prop_oneof![
                prop::collection::vec(any::<u32>(), 1..12),
                prop::collection::vec(1u32..200, 1..400),
                prop::collection::vec(prop_oneof![Just(1u32), Just(1_000_000)], 1..600),
            ],
        ) {
            let places = places(&weights);
            let total: u32 = places.iter().sum();
            prop_assert!(u64::from(total) <= MOST);
            prop_assert!(total as usize <= most_places(&weights.iter().map(|w| (*w).max(1)).collect::<Vec<_>>()));
            let sum: f64 = weights.iter().map(|weight| f64::from((*weight).max(1))).sum();
            for (weight, places) in weights.iter().zip(&places) {
                prop_assert!(*places > 0);
                let wanted = f64::from((*weight).max(1)) / sum;
                let drawn = f64::from(*places) / f64::from(total);
                prop_assert!((wanted - drawn).abs() <= 0.01, "{wanted} {drawn}");
            }
        }

        /// A budget that counts all endpoints has room for those that are ready.
        #[test]
        fn fewer_endpoints_take_no_more_places(
            weights in prop::collection::vec((1u32..5000, any::<bool>()), 1..200),
        ) {
            let all: Vec<u32> = weights.iter().map(|(weight, _)| *weight).collect();
            let ready: Vec<u32> = weights.iter().filter(|(_, ready)| *ready).map(|(weight, _)| *weight).collect();
            let taken: u32 = places(&ready).iter().sum();
            prop_assert!(taken as usize <= most_places(&all));
        }
    }
}

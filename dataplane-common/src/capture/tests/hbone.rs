//! The decisions about connections to destinations that speak HBONE.

use super::{
    decisions::{CONFIG, Fake, PROXIED, RULED, enrolled, rules},
    *,
};
use crate::Reason;

/// Each case has a workload's flags beside [`PROXIED`], whether the destination speaks HBONE, whether the proxy listens, the
/// verdict, and whether the verdict holds only if the endpoint does not speak HBONE.
#[test]
fn connections_to_what_speaks_hbone_are_never_direct() {
    let encrypts = Enrolled::ENCRYPTS;
    let auto = encrypts | Enrolled::ONLY_HBONE;
    let (pass, denies) = (Enrolled::FAIL_OPEN, Enrolled::EGRESS_DENY);
    let captured = (Reason::Captured, false);
    let down = (Reason::ProxyDown, false);
    let direct = |denies| (Reason::Direct, denies);
    let bypassed = |denies| (Reason::ProxyBypassed, denies);
    for (flags, speaks_hbone, listens, wanted, must_be) in [
        (auto, false, false, direct(false), true),
        (auto, false, true, direct(false), true),
        (auto, true, false, down, false),
        (auto, true, true, captured, false),
        (auto | pass, false, false, direct(false), true),
        (auto | pass, true, false, down, false),
        (auto | pass, true, true, captured, false),
        (auto | denies, false, true, direct(true), true),
        (auto | denies, true, true, captured, false),
        (auto | denies | pass, true, false, down, false),
        (encrypts, false, true, captured, false),
        (encrypts, true, true, captured, false),
        (encrypts, true, false, down, false),
        (encrypts | pass, false, false, bypassed(false), true),
        (encrypts | pass | denies, false, false, bypassed(true), true),
        (encrypts | pass, true, false, down, false),
        (0, true, true, captured, false),
        (pass, true, false, bypassed(false), false),
    ] {
        let fake = Fake {
            speaks_hbone,
            listens,
            is_known: true,
            ..rules()
        };
        let entry = enrolled(PROXIED | flags);
        let decide = |to, fake: &Fake| {
            decide_outbound(fake, &CONFIG, &entry, (addr(to), Port::new(80)), false)
        };
        let found = decide("10.9.0.1", &fake);
        assert_eq!(found, wanted, "{flags:#x} {speaks_hbone} {listens}");
        assert_eq!(must_be_plain(entry.flags, found.0), must_be, "{flags:#x}");
        // Exclusions, the workload itself and the egress policy come before.
        let (reason, _) = decide("10.0.0.2", &fake);
        assert_eq!(reason, Reason::ExcludedRange);
        assert!(!must_be_plain(entry.flags, reason));
        let itself = Fake {
            is_itself: true,
            ..fake.clone()
        };
        let (reason, _) = decide("10.9.0.1", &itself);
        assert_eq!(reason, Reason::ExcludedLoopback);
        // The service may get another endpoint than the workload.
        let encrypts = flags & encrypts != 0;
        assert_eq!(must_be_plain(entry.flags, reason), encrypts, "{flags:#x}");
        let unknown = Fake {
            is_known: false,
            ..fake
        };
        let is_denied = decide("10.9.0.1", &unknown).0 == Reason::EgressDenied;
        assert_eq!(is_denied, flags & denies != 0, "{flags:#x}");
    }
    // Without a proxy, no destination is asked for.
    let speaks = Fake {
        speaks_hbone: true,
        ..rules()
    };
    let to = (addr("10.9.0.1"), Port::new(80));
    let found = decide_outbound(&speaks, &CONFIG, &enrolled(RULED), to, false);
    assert_eq!(found, (Reason::Direct, false));
    assert!(!must_be_plain(RULED, found.0));
}

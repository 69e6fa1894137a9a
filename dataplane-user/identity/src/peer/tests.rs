use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, CodeSigning, ServerAuth};

use super::*;
use crate::fixture::{Authority, HOUR, Leaf, now, roots, verify_peer};

const WEB: &str = "spiffe://cluster.local/ns/shop/sa/web";

fn web() -> Identity {
    WEB.parse().unwrap()
}

fn refused(authority: &Authority, leaf: &Leaf) -> String {
    let roots = roots(&[("cluster.local", authority)]);
    let chain = [authority.certify(leaf)];
    verify_peer(&chain, now(), &roots).unwrap_err().to_string()
}

#[test]
fn a_peer_has_the_identity_in_its_certificate() {
    let root = Authority::new();
    let roots = roots(&[("cluster.local", &root)]);
    let leaf = Leaf::of(WEB);
    assert_eq!(
        verify_peer(&[root.certify(&leaf)], now(), &roots),
        Ok(web())
    );

    let intermediate = root.intermediate();
    let chain = [intermediate.certify(&leaf), intermediate.der()];
    assert_eq!(verify_peer(&chain, now(), &roots), Ok(web()));
    let cause = verify_peer(&chain[..1], now(), &roots).unwrap_err();
    assert!(
        cause
            .to_string()
            .contains("an intermediate certificate is missing"),
        "{cause}"
    );
}

#[test]
fn refusals_say_what_is_wrong() {
    let root = Authority::new();
    let leaf = || Leaf::of(WEB);
    for (leaf, message) in [
        (
            Leaf {
                to: now() - HOUR / 2,
                ..leaf()
            },
            "certificate expired at 2025-12-31T23:30:00Z",
        ),
        (
            Leaf {
                from: now() + HOUR / 2,
                ..leaf()
            },
            "certificate is not valid before 2026-01-01T00:30:00Z",
        ),
        (
            Leaf::of("spiffe://elsewhere/ns/shop/sa/web"),
            "peer presented spiffe://elsewhere/ns/shop/sa/web: trust domain elsewhere is not trusted",
        ),
        (
            Leaf::of("spiffe://cluster.local/web"),
            "\"spiffe://cluster.local/web\" is not an identity",
        ),
        (
            Leaf {
                uris: Vec::new(),
                ..leaf()
            },
            "the URIs [], expected exactly one",
        ),
        (
            Leaf {
                uris: vec![WEB.to_owned(), WEB.to_owned()],
                ..leaf()
            },
            "expected exactly one",
        ),
        (
            Leaf {
                is_ca: true,
                ..leaf()
            },
            "the certificate belongs to an authority",
        ),
        (
            Leaf {
                uses: vec![ServerAuth],
                ..leaf()
            },
            "must have both client and server authentication",
        ),
        (
            Leaf {
                uses: vec![CodeSigning],
                ..leaf()
            },
            "must have both client and server authentication",
        ),
    ] {
        let said = refused(&root, &leaf);
        assert!(said.contains(message), "{said:?} without {message:?}");
    }
    let without = Leaf {
        uses: Vec::new(),
        ..leaf()
    };
    let others = Leaf {
        uses: vec![ServerAuth, ClientAuth, CodeSigning],
        ..leaf()
    };
    for leaf in [without, others] {
        let roots = roots(&[("cluster.local", &root)]);
        assert_eq!(
            verify_peer(&[root.certify(&leaf)], now(), &roots),
            Ok(web())
        );
    }
    let roots = roots(&[("cluster.local", &root)]);
    assert_eq!(
        verify_peer(&[], now(), &roots),
        Err(PeerError::NoCertificate)
    );
    let garbage = [CertificateDer::from(vec![0x30, 0x03, 1, 2, 3])];
    let error = verify_peer(&garbage, now(), &roots).unwrap_err();
    assert!(matches!(error, PeerError::Unreadable(_)), "{error}");
}

#[test]
fn an_authority_signs_for_its_own_trust_domain_only() {
    let (here, there) = (Authority::new(), Authority::new());
    let roots = roots(&[("cluster.local", &here), ("elsewhere", &there)]);
    for authority in [&there, &here.intermediate()] {
        let chain = [authority.certify(&Leaf::of(WEB))];
        let error = verify_peer(&chain, now(), &roots).unwrap_err();
        assert!(
            matches!(&error, PeerError::Unverified { peer, .. } if *peer == web()),
            "{error}"
        );
    }
}

#[test]
fn an_expired_root_is_not_trusted() {
    let root = Authority::expired();
    let said = refused(&root, &Leaf::of(WEB));
    assert!(
        said.contains("no root of trust domain cluster.local is valid now"),
        "{said}"
    );
}

#[test]
fn revoked_certificates_are_refused() {
    let root = Authority::new();
    let mut roots = roots(&[("cluster.local", &root)]);
    let leaf = |serial| Leaf {
        serial,
        ..Leaf::of(WEB)
    };
    roots.revoked = vec![root.revoke(&[8, 9])];
    let (good, bad) = ([root.certify(&leaf(7))], [root.certify(&leaf(8))]);
    assert_eq!(verify_peer(&good, now(), &roots), Ok(web()));
    assert_eq!(
        verify_peer(&bad, now(), &roots),
        Err(PeerError::Revoked { peer: web() })
    );
    // The list is overdue, and its certificates stay revoked.
    let later = now() + HOUR * 3 / 4;
    assert_eq!(verify_peer(&good, later, &roots), Ok(web()));
    assert_eq!(
        verify_peer(&bad, later, &roots),
        Err(PeerError::Revoked { peer: web() })
    );

    // An intermediate's own certificate.
    let intermediate = root.intermediate();
    let chain = [intermediate.certify(&leaf(7)), intermediate.der()];
    assert_eq!(verify_peer(&chain, now(), &roots), Ok(web()));
    roots.revoked.push(intermediate.revoke(&[7]));
    assert_eq!(
        verify_peer(&chain, now(), &roots),
        Err(PeerError::Revoked { peer: web() })
    );
}

#[test]
fn each_of_several_lists_of_one_name_counts() {
    let (old, new) = (Authority::new(), Authority::new());
    let both = || roots(&[("cluster.local", &old), ("cluster.local", &new)]);
    let leaf = |serial| Leaf {
        serial,
        ..Leaf::of(WEB)
    };
    let good = [[old.certify(&leaf(7))], [new.certify(&leaf(7))]];
    let bad = [[old.certify(&leaf(8))], [new.certify(&leaf(9))]];

    // Lists of two keys with one name, and two lists of one key.
    let lists = [old.revoke(&[8]), new.revoke(&[9]), new.revoke(&[10])];
    for turn in 0..lists.len() {
        let mut roots = both();
        roots.revoked = lists.to_vec();
        roots.revoked.rotate_left(turn);
        for chain in &good {
            assert_eq!(verify_peer(chain, now(), &roots), Ok(web()), "{turn}");
        }
        for chain in bad.iter().chain([&[new.certify(&leaf(10))]]) {
            let revoked = Err(PeerError::Revoked { peer: web() });
            assert_eq!(verify_peer(chain, now(), &roots), revoked, "{turn}");
        }
    }

    // Only lists that the issuer's key did not sign.
    for lists in [1, 2] {
        let mut roots = both();
        roots.revoked = vec![new.revoke(&[9]); lists];
        let error = verify_peer(&good[0], now(), &roots).unwrap_err();
        assert!(
            matches!(error, PeerError::Unverified { .. }),
            "{lists}: {error}"
        );
        assert_eq!(verify_peer(&good[1], now(), &roots), Ok(web()));
    }
}

#[test]
fn roots_that_cannot_be_read_are_an_error() {
    let root = Authority::new();
    let mut wrong = roots(&[("cluster.local", &root)]);
    wrong.revoked = vec![vec![0x30, 0].into()];
    assert!(matches!(Verifier::new(&wrong), Err(RootsError::Revoked(_))));
    let mut wrong = roots(&[("cluster.local", &root)]);
    wrong
        .by_domain
        .get_mut("cluster.local")
        .unwrap()
        .push(vec![1].into());
    assert!(matches!(
        Verifier::new(&wrong),
        Err(RootsError::Root { .. })
    ));
}

#[test]
fn a_peer_that_is_not_meant_is_named() {
    let other: Identity = "spiffe://cluster.local/ns/shop/sa/db".parse().unwrap();
    assert_eq!(expect(web(), &[other.clone(), web()]), Ok(web()));
    let error = expect(web(), &[other]).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("peer presented {WEB}, expected spiffe://cluster.local/ns/shop/sa/db")
    );
}

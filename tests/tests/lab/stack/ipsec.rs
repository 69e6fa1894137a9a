//! IPsec policies beside services, on the path through the stack. With kube-proxy, the kernel applies a policy of the direction `fwd` to
//! the addresses that a packet arrives with, and one of the direction `out` to those that it leaves with.
//!
//! The policies have no association, so nothing that they protect can pass.

use anyhow::{Context as _, Result};
use dataplane_peers::Mode;
use dataplane_tests::Host;

use super::{Equal, agree, takes, worlds};
use crate::differential::world::{Worker, World};

scenarios! {
    Dataplane:
    policies_protect_what_they_protect_with_kube_proxy,
}

const JUDGE: Worker = Worker::KubeProxy(Mode::IptablesNft);

/// Policies of node1, and a letter for each [way](super::WAYS): `y` if it is answered. `UPLINK` and `GATEWAY` are node1's addresses:
/// flows to `e3` are masqueraded to the first, those to `e1` to the other.
const POLICIES: [(&str, &str); 8] = [
    ("src ext dst UPLINK dir fwd", "nnynyyyy"),
    // Only a packet for the node itself meets this policy.
    ("src ext dst UPLINK proto tcp dir in", "yyyyyyyy"),
    // The kernel meets these by the endpoint's address, too.
    ("src ext dst ANY dir fwd", "nnnnyyyy"),
    ("src vm dst VIP dir fwd", "yyyyynyy"),
    // Answers.
    ("src e1 dst GATEWAY dir fwd", "nynynyyy"),
    ("src e3 dst UPLINK dir fwd", "yyynyyyy"),
    // Requests as they leave.
    ("src UPLINK dst e3 dir out", "yyynyyyy"),
    // Optional encryption: packets that arrive in clear pass, and nothing is said of those that leave.
    ("src e3 dst vm dir fwd optional", "yyyyyyyy"),
];

/// A policy in the words of `ip xfrm policy`, without its template.
fn selector(world: &World, policy: &str, v4: bool) -> String {
    let of = |host: &Host| host.addresses()[usize::from(!v4)].to_string();
    let e1 = world.host("e1");
    let words = policy.split(' ').map(|word| match word {
        "UPLINK" => of(world.host("node1")),
        "GATEWAY" if v4 => e1.gateway4().to_string(),
        "GATEWAY" => e1.gateway6().to_string(),
        "VIP" if v4 => "10.96.0.1".to_owned(),
        "VIP" => "fd00:10:96::1".to_owned(),
        "ANY" if v4 => "0.0.0.0/0".to_owned(),
        "ANY" => "::/0".to_owned(),
        "src" | "dst" | "dir" | "proto" | "tcp" | "in" | "out" | "fwd" => word.to_owned(),
        host => of(world.host(host)),
    });
    words.collect::<Vec<_>>().join(" ")
}

fn policies_protect_what_they_protect_with_kube_proxy() -> Result<()> {
    let worlds = worlds(&[JUDGE, Worker::Dataplane])?;
    let agent = worlds[1].agent().context("an agent")?;
    if let Err(error) = worlds[0].host("node1").ip("xfrm policy") {
        println!("skipped the policies of stack::ipsec: this kernel takes none: {error:#}");
        return Ok(());
    }
    for (policy, wanted) in POLICIES {
        let (policy, level) = match policy.strip_suffix(" optional") {
            Some(policy) => (policy, "use"),
            None => (policy, "required"),
        };
        let of = |world: &World| [true, false].map(|v4| selector(world, policy, v4));
        for world in &worlds {
            for policy in of(world) {
                let template = format!("tmpl proto esp mode transport level {level}");
                let add = format!("xfrm policy add {policy} {template}");
                world.host("node1").ip(&add)?;
            }
        }
        takes(agent, "stack").context(policy)?;
        agree(&worlds, Equal::All, wanted).context(policy)?;
        for world in &worlds {
            for policy in of(world) {
                let delete = format!("xfrm policy delete {policy}");
                world.host("node1").ip(&delete)?;
            }
        }
        takes(agent, "fast").context(policy)?;
    }
    Ok(())
}

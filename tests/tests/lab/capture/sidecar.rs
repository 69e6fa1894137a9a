//! A pod with a sidecar, whose connections the rules of a mesh capture.

use std::fs;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{World, proxies, relay::Relay};
use crate::{
    cluster::reaches,
    imported_mesh::{self, NATIVE},
    outcome::{self, Outcome},
};

/// An endpoint that the pod connects to.
pub const TO: &str = "10.244.1.5:7";
/// The connections that each scenario is about.
pub const CONNECT: &str = "connect --count 3";

/// The commands that load rules of iptables.
const FOUR: &str = "iptables-nft-restore --noflush";
const SIX: &str = "ip6tables-nft-restore --noflush";

/// The rules that Istio writes in nf_tables with `INVALID_DROP`: another table.
const INVALID: &str = "\
table inet istio-proxy-mangle {
 chain prerouting { type filter hook prerouting priority -150; }
 chain istio-drop { }
}
add rule inet istio-proxy-mangle prerouting meta l4proto tcp ct state invalid counter jump istio-drop
add rule inet istio-proxy-mangle istio-drop counter drop
";

/// A mesh with sidecars.
#[derive(Clone, Copy, Debug)]
pub enum Mesh {
    Istio,
    /// With rules in nf_tables' own tables.
    IstioNative,
    Osm,
}

impl Mesh {
    fn owner(self) -> &'static str {
        match self {
            Self::Istio | Self::IstioNative => "istio",
            Self::Osm => "osm",
        }
    }

    /// Whether a line of the rules is the mesh's.
    pub fn has(self, line: &str) -> bool {
        line.contains(match self {
            Self::Istio => "ISTIO_",
            Self::IstioNative => "istio-",
            Self::Osm => "PROXY_",
        })
    }

    /// Part of a take-over's output: the rules that it removes.
    pub fn removal(self) -> &'static str {
        match self {
            Self::Istio => "-X ISTIO_OUTPUT",
            Self::IstioNative => "nft delete table inet istio-proxy-nat",
            Self::Osm => "-X PROXY_OUTPUT",
        }
    }

    /// The sidecar's rules, each with the command that loads it.
    fn tables(self) -> Vec<(&'static str, String)> {
        // The proxy here has another user and port.
        let here = |rules: &str| rules.replace("1337", "1500").replace("15006", "15003");
        // With it, the proxy here would get its own connections to the application.
        let without = |rules: &str, of_itself: &str| -> String {
            let lines = here(rules);
            let lines = lines.split_inclusive('\n');
            lines.filter(|line| !line.contains(of_itself)).collect()
        };
        let istio = |lo: &str, six: &str, range: &str| {
            let rules = imported_mesh::sidecar(lo, six, range);
            without(&rules, "-A ISTIO_OUTPUT -o lo ! -d")
        };
        match self {
            Self::Istio => vec![
                (FOUR, istio("127.0.0.1/32", "127.0.0.6/32", "10.96.0.0/12")),
                (SIX, istio("::1/128", "::6/128", "fd00:96::/64")),
            ],
            Self::IstioNative => {
                let rules = without(NATIVE, "skuid 1500 counter jump istio-in-redirect");
                vec![("nft -f -", rules + INVALID)]
            }
            Self::Osm => vec![(FOUR, proxies::OSM.to_owned())],
        }
    }

    /// The rules as `mesh.rules`.
    pub fn rules(self) -> Value {
        match self {
            Self::Istio | Self::IstioNative => json!({
                "excludeOutboundIPRanges": ["10.96.0.0/12", "fd00:96::/64"],
                "excludeOutboundPorts": [3306],
                "excludeInboundPorts": [9090],
                "excludeUIDs": [1500],
                "excludeGIDs": [888],
            }),
            Self::Osm => json!({
                "excludeOutboundIPRanges": ["10.244.1.6/32", "::/0"],
                "excludeOutboundPorts": [80],
                "excludeInboundPorts": [80],
                "excludeUIDs": [1500],
            }),
        }
    }
}

/// A pod with a sidecar and its rules, and with a rule of another owner.
pub struct Pod {
    pub mesh: Mesh,
    pub world: World,
    _proxy: Relay,
}

impl Pod {
    pub fn start(mesh: Mesh) -> Result<Self> {
        let world = World::new()?;
        let proxy = Relay::haproxy(&world)?;
        Self::with(mesh, world, proxy, &|rules| rules)
    }

    pub fn with(
        mesh: Mesh,
        world: World,
        proxy: Relay,
        change: &dyn Fn(String) -> String,
    ) -> Result<Self> {
        let pod = Self {
            mesh,
            world,
            _proxy: proxy,
        };
        pod.load(change)?;
        let other = "iptables-nft -t nat -A POSTROUTING -p tcp --dport 4711 -j ACCEPT";
        let shell = pod.world.app().command("sh");
        shell.args(["-c", other]).run()?;
        Ok(pod)
    }

    /// Loads the mesh's rules, changed.
    pub fn load(&self, change: &dyn Fn(String) -> String) -> Result<()> {
        let path = self.world.state.path().join("rules");
        for (command, rules) in self.mesh.tables() {
            fs::write(&path, change(rules))?;
            let script = format!("{command} < {}", path.display());
            let shell = self.world.app().command("sh");
            shell.args(["-c", &script]).run()?;
        }
        Ok(())
    }

    pub fn takeover(&self, arguments: &[&str], dies: Option<u32>) -> Result<Outcome> {
        let directory = self.world.state.path().join("takeover");
        let directory = directory.to_string_lossy().into_owned();
        let netns = self.world.app().netns().to_owned();
        let all = ["takeover", "--owner", self.mesh.owner(), "--netns", &netns];
        let all = [&all, &["--takeover-dir", &directory][..], arguments].concat();
        let agent = self.world.agent()?;
        let Some(point) = dies else {
            return outcome::migrate(agent, all);
        };
        let command = agent.migrate(all)?;
        let output = command
            .env("DATAPLANE_TAKEOVER_DIES", point.to_string())
            .output()?;
        Outcome::of(&output)
    }

    /// The rules of the pod, without counters.
    pub fn rules(&self) -> Result<Vec<String>> {
        let print = "iptables-nft-save; ip6tables-nft-save; nft -s list tables | sort | \
                     while read table family name; do case $name in istio-*) nft -s list $table $family $name;; esac; done";
        let all = self.world.app().command("sh").args(["-c", print]).run()?;
        let lines = all.lines().filter(|line| !line.starts_with('#'));
        let mut lines: Vec<String> = lines
            .map(|line| line.split(" [").next().unwrap_or_default().to_owned())
            .collect();
        // The kernel lists chains in an order of its own; rules of a chain stay in theirs.
        lines.sort_by_key(|line| line.split(' ').nth(1).map(str::to_owned));
        Ok(lines)
    }

    /// Cleanup leaves it, because nothing else would capture its connections.
    pub fn is_not_cleaned_up(&mut self) -> Result<()> {
        let directory = self.world.state.path().join("takeover");
        let directory = directory.to_string_lossy().into_owned();
        let agent = self.world.agent.as_mut().context("an agent")?;
        agent.kill();
        let cleanup = ["cleanup", "--takeover-dir", &directory];
        outcome::run_args(agent, cleanup)?.exits(1)?.says(&[
            "nothing was removed",
            "--revert",
            "--force",
        ])?;
        let shown = outcome::run_args(agent, [&cleanup[..], &["--dry-run"]].concat())?;
        shown.exits(0)?.says(&["would be removed"])?;
        agent.start()?;
        Ok(())
    }

    /// Whether connections get where they are to go.
    pub fn works(&self) -> Result<()> {
        reaches(self.world.app(), TO, CONNECT, &["one"])?;
        reaches(self.world.lab.pod("one"), "10.244.1.8:7", CONNECT, &["app"])?;
        Ok(())
    }
}

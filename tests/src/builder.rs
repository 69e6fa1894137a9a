//! Describes a lab and builds it.

use std::{collections::BTreeSet, net::Ipv4Addr, sync::Once};

use crate::{
    error::{Error, Result},
    identity::{self, LabId},
    lab::{Host, Lab, Planned, Role},
    network,
    programs::Programs,
    requirements::{Requirement, missing},
};

/// Longest name of a host: the node's end of a pod's link is `veth-NAME`, and the kernel allows 15
/// characters.
const MAX_NAME: usize = 10;

/// A description of a lab. [`LabBuilder::build`] reports its first mistake.
#[derive(Debug, Default)]
#[must_use = "a lab exists after `build`"]
pub struct LabBuilder {
    hosts: Vec<Planned>,
    mistake: Option<String>,
    programs: Option<Programs>,
}

impl Lab {
    /// Describes a lab.
    pub fn builder() -> LabBuilder {
        LabBuilder::default()
    }
}

impl LabBuilder {
    /// Sets where the lab's programs are; by default they are those built with this program.
    pub fn programs(mut self, programs: Programs) -> Self {
        self.programs = Some(programs);
        self
    }

    /// Adds a node. Node N has the addresses 192.168.77.N and fd77::N and the pod networks 10.244.N.0/24 and
    /// fd00:10:244:N::/64.
    pub fn node(mut self, name: &str) -> Self {
        let number = self.next_number(Role::Node);
        let ipv4 = Ipv4Addr::new(192, 168, 77, number);
        self.add(name, Role::Node, number, None, ipv4)
    }

    /// Adds a pod to a node that was added before. Its v6 address has the digits of its v4 one: 10.244.2.10 has
    /// fd00:10:244:2::10 beside it.
    pub fn pod(self, node: &str, name: &str, ipv4: &str) -> Self {
        let number = self
            .hosts
            .iter()
            .find(|host| host.role == Role::Node && host.name == node)
            .map(|host| host.number);
        let Some(number) = number else {
            return self.mistaken(format!("pod {name}: there is no node {node}"));
        };
        let address: Ipv4Addr = match ipv4.parse() {
            Ok(address) => address,
            Err(error) => return self.mistaken(format!("pod {name}: address {ipv4}: {error}")),
        };
        let [a, b, c, d] = address.octets();
        if [a, b, c] != [10, 244, number] || d < 2 || d == 255 {
            return self.mistaken(format!(
                "pod {name}: address {address} is not between 10.244.{number}.2 and \
                 10.244.{number}.254, the pod network of {node}"
            ));
        }
        self.add(name, Role::Pod, number, Some(node.to_owned()), address)
    }

    /// Adds a pod whose processes are not in its node's cgroup, like the processes in a virtual machine: the node's
    /// programs see its packets, but not its sockets.
    pub fn vm(self, node: &str, name: &str, ipv4: &str) -> Self {
        let mut this = self.pod(node, name, ipv4);
        if let Some(host) = this.hosts.last_mut() {
            host.apart = host.name == name;
        }
        this
    }

    /// Adds a client outside of the cluster, on the nodes' own network: the first has the addresses 192.168.77.201 and
    /// fd77::201. It has no route to pods or services except those that a scenario adds.
    pub fn external(mut self, name: &str) -> Self {
        let number = self.next_number(Role::External).saturating_add(200);
        let ipv4 = Ipv4Addr::new(192, 168, 77, number);
        self.add(name, Role::External, number, None, ipv4)
    }

    fn next_number(&mut self, role: Role) -> u8 {
        let count = self.hosts.iter().filter(|host| host.role == role).count();
        if count >= 50 {
            self.mistake
                .get_or_insert_with(|| "more than 50 nodes or outside clients".into());
        }
        u8::try_from(count.min(50)).unwrap_or(50) + 1
    }

    fn add(
        mut self,
        name: &str,
        role: Role,
        number: u8,
        node: Option<String>,
        ipv4: Ipv4Addr,
    ) -> Self {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(plain) {
            return self.mistaken(format!(
                "the name {name:?} is not 1 to {MAX_NAME} lower-case letters, digits and dashes"
            ));
        }
        if name == Role::FABRIC_NAME || self.hosts.iter().any(|host| host.name == name) {
            return self.mistaken(format!("the name {name} is used twice"));
        }
        if self.hosts.iter().any(|host| host.ipv4 == ipv4) {
            return self.mistaken(format!("{name}: the address {ipv4} is used twice"));
        }
        self.hosts.push(Planned {
            name: name.to_owned(),
            role,
            number,
            node,
            ipv4,
            apart: false,
        });
        self
    }

    fn mistaken(mut self, mistake: String) -> Self {
        self.mistake.get_or_insert(mistake);
        self
    }

    /// Builds the lab. The first lab in a process also sweeps the leftovers of dead creators.
    ///
    /// # Errors
    /// When the description contradicts itself, the machine lacks something, or the operating system refuses; the parts
    /// made until then are removed again.
    pub fn build(self) -> Result<Lab> {
        static SWEEP: Once = Once::new();
        if let Some(mistake) = self.mistake {
            return Err(Error::Description(mistake));
        }
        if !self.hosts.iter().any(|host| host.role == Role::Node) {
            return Err(Error::Description("it has no node".into()));
        }
        if let Some(lack) = missing(Requirement::Lab) {
            return Err(Error::Requirement(lack));
        }
        let programs = self.programs.map_or_else(Programs::beside_this_one, Ok)?;
        let probe = programs.probe()?;
        SWEEP.call_once(|| drop(identity::sweep()));

        let id = LabId::new()?;
        let cgroup = id.cgroup()?;
        let hosts = self
            .hosts
            .into_iter()
            .map(|p| Host::new(p, &id, &cgroup, &probe))
            .collect();
        // From here on dropping the lab removes its parts.
        let lab = Lab::new(id, programs, hosts);
        let directories: BTreeSet<_> = lab.hosts().iter().map(Host::cgroup).collect();
        for directory in directories {
            identity::create_dir(directory)?;
        }
        identity::create_dir(&lab.id().state_dir())?;
        let fabric = lab.id().netns(Role::FABRIC_NAME);
        let mut namespaces: Vec<&str> = lab.hosts().iter().map(Host::netns).collect();
        namespaces.push(&fabric);
        network::create_namespaces(&namespaces)?;
        network::connect(&fabric, lab.hosts())?;
        Ok(lab)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistake(builder: LabBuilder) -> String {
        builder
            .build()
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    }

    #[test]
    fn a_mistaken_description_is_refused_with_its_reason() {
        let one = || Lab::builder().node("node1");
        for (builder, reason) in [
            (Lab::builder(), "no node"),
            (one().pod("node2", "a", "10.244.2.2"), "no node node2"),
            (
                one().pod("node1", "a", "10.244.2.2"),
                "not between 10.244.1.2",
            ),
            (one().pod("node1", "a", "10.244.1.1"), "not between"),
            (one().pod("node1", "a", "10.244.1"), "address 10.244.1:"),
            (one().pod("node1", "node1", "10.244.1.2"), "used twice"),
            (
                one()
                    .pod("node1", "a", "10.244.1.2")
                    .pod("node1", "b", "10.244.1.2"),
                "used twice",
            ),
            (
                one().pod("node1", "much-too-long", "10.244.1.2"),
                "lower-case",
            ),
            (one().external("A b"), "lower-case"),
        ] {
            let said = mistake(builder);
            assert!(said.contains(reason), "{said:?} does not say {reason:?}");
        }
    }
}

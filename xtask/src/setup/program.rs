//! The distribution's programs that chores run, with the purposes that need them.

/// A program of the distribution, which chores run by its name.
#[derive(Debug)]
pub struct Program {
    pub name: &'static str,
    /// Debian's and Ubuntu's package.
    pub package: &'static str,
    pub needed_for: &'static str,
    /// The first purpose that needs the program. Later purposes need it too.
    pub least: Purpose,
}

/// The programs that chores run.
pub const PROGRAMS: [Program; 11] = [
    Program {
        name: "ip",
        package: "iproute2",
        needed_for: "builds the lab's network namespaces, links and routes",
        least: Purpose::Lab,
    },
    Program {
        name: "iptables-legacy-restore",
        package: "iptables",
        needed_for: "loads rules as kube-proxy's, which tests and benchmarks compare with",
        least: Purpose::Bench,
    },
    Program {
        name: "iptables-nft-restore",
        package: "iptables",
        needed_for: "loads rules as kube-proxy's, which tests and benchmarks compare with",
        least: Purpose::Bench,
    },
    Program {
        name: "nft",
        package: "nftables",
        needed_for: "loads rules as kube-proxy's, which tests and benchmarks compare with",
        least: Purpose::Bench,
    },
    Program {
        name: "haproxy",
        package: "haproxy",
        needed_for: "relays beside our proxy, in tests and benchmarks",
        least: Purpose::Bench,
    },
    Program {
        name: "nginx",
        // This package also installs nginx itself.
        package: "libnginx-mod-stream",
        needed_for: "relays beside our proxy, in tests and benchmarks",
        least: Purpose::Bench,
    },
    Program {
        name: "dig",
        package: "bind9-dnsutils",
        needed_for: "asks our DNS server, in tests",
        least: Purpose::Bench,
    },
    Program {
        name: "unbound",
        package: "unbound",
        needed_for: "is the resolver behind our DNS server, in tests",
        least: Purpose::Bench,
    },
    Program {
        name: "musl-gcc",
        package: "musl-tools",
        needed_for: "compiles a client of our DNS server with musl's resolver, in tests",
        least: Purpose::Bench,
    },
    Program {
        name: "hey",
        package: "hey",
        needed_for: "is a client of our DNS server with Go's resolver, in tests",
        least: Purpose::Bench,
    },
    Program {
        name: "qemu-system-x86_64",
        package: "qemu-system-x86",
        needed_for: "boots a guest with another kernel",
        least: Purpose::Guest,
    },
];

/// Purpose of the tools. Each purpose also needs the tools of the purposes before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// Compiling.
    Build,
    /// Network namespaces that stand for nodes and pods: run, test, lab.
    Lab,
    /// Comparing with kube-proxy's rules, and with other proxies.
    Bench,
    /// Scenarios on other kernels.
    Guest,
}

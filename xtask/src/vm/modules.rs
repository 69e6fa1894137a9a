//! The kernel modules that a guest loads, each after its dependencies.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

/// Modules for the lab's networks, for the programs' hooks, and for rules of other programs, if a
/// kernel has them as modules.
const WANTED: &[&str] = &[
    // Links between namespaces, the switch between nodes, and VLANs.
    "veth",
    "bridge",
    "dummy",
    "8021q",
    // Links without a link-layer header.
    "tun",
    // Programs at TC, if the kernel has no TCX, and filters that other programs attach there.
    "sch_ingress",
    "cls_bpf",
    "cls_matchall",
    "act_gact",
    "act_mirred",
    // Finding and closing sockets over netlink.
    "tcp_diag",
    "udp_diag",
    // Netfilter's connection tracking and NAT.
    "nf_conntrack",
    "nf_conntrack_netlink",
    "nf_nat",
    // iptables: its tables, and the matches and targets of kube-proxy's and meshes' rules.
    "iptable_filter",
    "iptable_mangle",
    "iptable_nat",
    "iptable_raw",
    "ip6table_filter",
    "ip6table_mangle",
    "ip6table_nat",
    "ip6table_raw",
    "ipt_REJECT",
    "ip6t_REJECT",
    "xt_CT",
    "xt_LOG",
    "xt_MASQUERADE",
    "xt_REDIRECT",
    "xt_TPROXY",
    "xt_addrtype",
    "xt_bpf",
    "xt_cgroup",
    "xt_comment",
    "xt_connmark",
    "xt_conntrack",
    "xt_iprange",
    "xt_limit",
    "xt_mac",
    "xt_mark",
    "xt_multiport",
    "xt_nat",
    "xt_nfacct",
    "xt_owner",
    "xt_pkttype",
    "xt_recent",
    "xt_sctp",
    "xt_set",
    "xt_socket",
    "xt_state",
    "xt_statistic",
    "xt_tcpudp",
    "ip_set_hash_net",
    "ip_set_hash_ip",
    // nft, and iptables over nft.
    "nf_tables",
    "nft_chain_nat",
    "nft_compat",
    "nft_ct",
    "nft_fib_inet",
    "nft_fib_ipv4",
    "nft_fib_ipv6",
    "nft_hash",
    "nft_limit",
    "nft_log",
    "nft_masq",
    "nft_nat",
    "nft_numgen",
    "nft_objref",
    "nft_redir",
    "nft_reject_inet",
    "nft_reject_ipv4",
    "nft_reject_ipv6",
    "nft_socket",
    "nft_tproxy",
    "nfnetlink_log",
    // IPsec: policies and associations by netlink, ESP, and its encryption (`rfc4106(gcm(aes))`).
    "xfrm_user",
    "esp4",
    "esp6",
    "ctr",
    "gcm",
    "ghash_generic",
    "seqiv",
    // A service may have ports of this protocol.
    "sctp",
];

/// A module in the form that the guest loads.
#[derive(Debug)]
pub struct Module {
    pub name: String,
    pub bytes: Vec<u8>,
}

/// Returns the modules of [`WANTED`] in a directory such as `/lib/modules/6.1.0-56-cloud-amd64`,
/// with their dependencies, in the order in which to load them. A module that is not there is built
/// into the kernel, or missing; the tests that need it then report this.
pub fn collect(directory: &Path) -> Result<Vec<Module>> {
    let mut files = BTreeMap::new();
    find(directory, &mut files)
        .with_context(|| format!("cannot look for modules in {}", directory.display()))?;
    let mut modules = Vec::new();
    for name in WANTED {
        add(name, &files, &mut modules)?;
    }
    Ok(modules)
}

fn add(name: &str, files: &BTreeMap<String, PathBuf>, modules: &mut Vec<Module>) -> Result<()> {
    let Some(file) = files.get(name) else {
        return Ok(());
    };
    if modules.iter().any(|module| module.name == name) {
        return Ok(());
    }
    let bytes = read(file)?;
    for needed in needs(&bytes) {
        add(&needed, files, modules)?;
    }
    modules.push(Module {
        name: name.to_owned(),
        bytes,
    });
    Ok(())
}

fn find(directory: &Path, files: &mut BTreeMap<String, PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        // Symbolic links (`build`, `source`) lead elsewhere.
        if entry.file_type()?.is_dir() {
            find(&path, files)?;
        } else if let Some((name, "" | ".xz" | ".zst" | ".gz")) =
            entry.file_name().to_string_lossy().split_once(".ko")
        {
            // A file's name may have a dash instead of an underscore in the module's name.
            files.insert(name.replace('-', "_"), path);
        }
    }
    Ok(())
}

/// Returns a module's bytes, uncompressed: kernels differ in the compressions that they support.
fn read(file: &Path) -> Result<Vec<u8>> {
    let unpacker = match file.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(file).with_context(|| format!("cannot read {}", file.display())),
    };
    let mut command = Command::new(unpacker);
    command.args(["--decompress", "--stdout"]).arg(file);
    crate::command::output_bytes(&mut command)
}

/// Returns the names after `depends=` in the module's `.modinfo` section, which contains strings
/// that end with a zero byte.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let list = module
        .windows(KEY.len())
        .position(|window| window == KEY)
        .map_or(&[][..], |at| &module[at + KEY.len()..]);
    let list = list.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(list)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(depends: &str) -> Vec<u8> {
        format!("\x7fELF\0license=GPL\0depends={depends}\0name=x\0").into_bytes()
    }

    #[test]
    fn a_module_comes_after_what_it_needs_and_once() {
        let directory = std::env::temp_dir().join(format!("xtask-modules-{}", std::process::id()));
        let kernel = directory.join("kernel/net");
        fs::create_dir_all(&kernel).unwrap();
        for (file, depends) in [
            ("bridge.ko", "stp,llc"),
            ("stp.ko", "llc"),
            ("llc.ko", ""),
            ("tcp_diag.ko", "inet-diag"),
            ("inet-diag.ko", ""),
            ("unwanted.ko", ""),
            ("veth.txt", ""),
        ] {
            fs::write(kernel.join(file), module(depends)).unwrap();
        }
        let modules = collect(&directory);
        fs::remove_dir_all(&directory).unwrap();
        let names: Vec<String> = modules.unwrap().into_iter().map(|m| m.name).collect();
        assert_eq!(names, ["llc", "stp", "bridge", "inet_diag", "tcp_diag"]);
    }
}

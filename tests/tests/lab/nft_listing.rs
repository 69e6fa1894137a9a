//! Rules of nf_tables as `dataplane` reads them from the kernel, compared with `nft`'s listing.

use anyhow::{Context as _, Result, ensure};
use dataplane_tests::{Host, Lab};
use kernel::netfilter;
use migrate::kube_proxy::{Imported, Text, import};

use crate::{features::on, iptables::load};

scenarios! {
    Lab:
    kube_proxys_rules_are_read_as_nft_lists_them,
    many_forms_of_rules_are_read_as_nft_lists_them,
    a_rule_that_cannot_be_said_is_never_left_out,
    rules_that_change_are_read_as_of_one_moment,
}

fn lab() -> Result<Lab> {
    Ok(Lab::builder().node("node1").build()?)
}

fn nft(host: &Host, family: &str, table: &str) -> Result<String> {
    let list = host.command("nft").args(["list", "table", family, table]);
    Ok(list.run()?)
}

fn ours(host: &Host, family: &str, table: &str) -> Result<String> {
    on(host, |_| Ok(netfilter::listed(family, table)?))
}

/// The lines of a listing: each element of a set or a map is a line of its own, and these are sorted.
fn lines(listing: &str) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut elements: Option<Vec<String>> = None;
    for line in listing
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
    {
        let (line, begins) = match line.strip_prefix("elements = {") {
            Some(rest) => (rest, true),
            None => (line, false),
        };
        if begins {
            elements = Some(Vec::new());
        }
        let Some(list) = &mut elements else {
            all.push(line.to_owned());
            continue;
        };
        let (line, ends) = match line.strip_suffix('}') {
            Some(line) => (line, true),
            None => (line, false),
        };
        list.extend(
            line.split(", ")
                .map(|e| e.trim().trim_end_matches(',').to_owned()),
        );
        if ends {
            // Elements that rules remember for a time are left out.
            list.retain(|element| !element.is_empty() && !element.contains(" expires "));
            list.sort();
            all.append(list);
            elements = None;
        }
    }
    all
}

fn same(host: &Host, family: &str, table: &str) -> Result<()> {
    let (nft, ours) = (nft(host, family, table)?, ours(host, family, table)?);
    let (wanted, found) = (lines(&nft), lines(&ours));
    let differs = wanted
        .iter()
        .zip(&found)
        .find(|(wanted, found)| wanted != found);
    ensure!(
        differs.is_none() && wanted.len() == found.len(),
        "{family} {table}: {differs:?}, {} lines and {}\nnft:\n{nft}\nours:\n{ours}",
        wanted.len(),
        found.len()
    );
    Ok(())
}

fn imported(text: String) -> Result<Imported> {
    let origin = "rules".to_owned();
    Ok(import(&[Text { origin, text }])?)
}

fn kube_proxys_rules_are_read_as_nft_lists_them() -> Result<()> {
    const RULES: &str = include_str!("../../data/kube-proxy-1.36/nft-ruleset.txt");
    let lab = lab()?;
    let node = lab.node("node1");
    load(node, "nft -f -", RULES)?;
    for family in ["ip", "ip6"] {
        same(node, family, "kube-proxy")?;
        if family == "ip6" {
            // The recorded node has no services of this family.
            ensure!(imported(ours(node, family, "kube-proxy")?).is_err());
            continue;
        }
        let wanted = imported(nft(node, family, "kube-proxy")?)?;
        let found = imported(ours(node, family, "kube-proxy")?)?;
        ensure!(
            wanted.services.len() > 5,
            "{} services",
            wanted.services.len()
        );
        ensure!(wanted.services == found.services);
        ensure!(
            wanted.facts == found.facts,
            "{:?}, {:?}",
            wanted.facts,
            found.facts
        );
        ensure!(wanted.leftovers.len() == found.leftovers.len());
    }
    Ok(())
}

/// One table of each family, with rules as kube-proxy, meshes, firewalld and people write them.
const FORMS: &str = r#"
table ip four {
	comment "a table"
	set nets { type ipv4_addr; flags interval; comment "some"; elements = { 10.0.0.0/8, 192.168.1.5-192.168.1.9, 203.0.113.7 }; }
	set pairs { type ipv4_addr . inet_service; flags interval; elements = { 10.0.0.0/24 . 80-90, 10.1.1.1 . 443 }; }
	set marks { type mark; elements = { 0x1, 0x539 }; }
	set names { type ifname; elements = { "eth0", "veth1" }; }
	set seen { type ipv4_addr; size 100; flags dynamic,timeout; timeout 3h2m; }
	set temporary { type ipv4_addr; flags timeout; timeout 1d; }
	map verdicts { type inet_proto . inet_service : verdict; elements = { tcp . 80 : jump web, udp . 53 comment "dns" : drop, tcp . 81 : accept }; }
	map open { type ipv4_addr : verdict; flags interval; elements = { 10.0.0.0/8 : accept, 224.0.0.0/3 : drop, * : accept }; }
	map addresses { type inet_service : ipv4_addr; elements = { 80 : 10.9.9.9, 81 : 10.9.9.8 }; }
	chain web { counter return; }
	chain pre {
		type nat hook prerouting priority dstnat - 5; policy accept;
		ip daddr 10.96.0.1 tcp dport 443 dnat to 10.0.0.1:6443
		tcp dport 80 redirect to :15006
		udp dport 53 redirect to :15053
		meta l4proto tcp dnat to numgen random mod 2 map { 0 : 10.0.0.1, 1 : 10.0.0.2 }
		meta l4proto tcp dnat ip to numgen inc mod 2 map { 0 : 10.0.0.1 . 80, 1 : 10.0.0.2 . 81 }
		dnat to tcp dport map @addresses
		ip daddr 10.3.0.0/16 dnat to 10.4.4.4
		fib daddr type local meta l4proto . th dport vmap @verdicts
		iifname "eth*" tcp dport { 80, 443, 8000-8010 } dnat to 10.0.0.9:8080
	}
	chain post {
		type nat hook postrouting priority srcnat; policy accept;
		meta mark & 0x00004000 == 0x00004000 masquerade
		meta mark & 0x00000fff != 0x00000111 masquerade fully-random
		ip saddr @nets oifname != "lo" masquerade random
		ip saddr 127.0.0.6 snat to 169.254.7.127
		meta l4proto tcp masquerade to :1024-2048
		ct status dnat ip saddr . ip daddr . th dport { 10.0.0.1 . 10.0.0.1 . 80 } masquerade
	}
	chain mangle {
		type route hook output priority mangle; policy accept;
		meta mark set 0x00000539
		meta mark set meta mark | 0x00004000
		meta mark set meta mark ^ 0x00004000
		meta mark set meta mark & 0xffffbfff
		ct mark set meta mark
		meta l4proto tcp meta mark set 0x00000002 tcp dport 80 accept
		meta mark set ct mark
		ct mark & 0x0000ffff == 0x00000111 meta mark set 0x00000111
		meta skuid 1337 return
		meta skgid != 1337 accept
		meta mark @marks accept
		iifname @names accept
		meta l4proto { tcp, udp } accept
	}
	chain filter {
		type filter hook forward priority filter; policy drop;
		comment "the firewall"
		ct state established,related accept
		ct state { new, invalid } drop
		ct state vmap { established : accept, invalid : drop }
		ip saddr 10.1.0.0/20 accept
		ip saddr != 10.0.0.0/8 drop
		ip daddr 10.1.2.0-10.1.2.77 accept
		ip protocol icmp accept
		ip saddr . tcp dport @pairs accept comment "with a \ in it"
		tcp dport != 22 reject with tcp reset
		udp dport 1000-2000 reject
		reject with icmp host-prohibited
		update @seen { ip saddr }
		add @seen { ip daddr timeout 10s }
		ip saddr @seen goto web
		log prefix "dropped: " drop
		ct original ip daddr 10.96.0.10 accept
		oif "lo" accept
		counter packets 5 bytes 300 drop
		tcp sport < 1024 drop
		meta mark 0x1 accept
	}
	chain raw {
		type filter hook prerouting priority raw; policy accept;
		udp dport 53 notrack
		ct zone set 1
		ct original zone set 2
		ct zone set iifname map { "eth0" : 5 }
	}
	chain numbers {
		type filter hook prerouting priority 10; policy accept;
		ct zone 5 accept
		ct zone { 1, 2 } accept
		meta length 100 accept
		meta length != 1500 accept
		iifgroup 5 accept
		iifgroup { 1, 2 } accept
		meta cpu 1 accept
		iifname { "br-*", "eth*", "lo" } accept
		ip saddr vmap @open
	}
	chain proxied {
		type filter hook prerouting priority mangle + 1; policy accept;
		meta l4proto tcp tproxy to :15001
		meta l4proto tcp tproxy to 127.0.0.1:15006
	}
}
table ip6 six {
	set nets { type ipv6_addr; flags interval; elements = { fd00::/8, 2001:db8::1 }; }
	chain filter {
		type filter hook input priority security; policy accept;
		ip6 saddr fd00:10:244::/56 accept
		ip6 daddr ::1 accept
		ip6 daddr @nets tcp dport 80 accept
		ip6 saddr != fe80::/10 reject
		meta l4proto ipv6-icmp accept
		fib saddr . iif oif missing drop
	}
	chain nat {
		type nat hook prerouting priority -99; policy accept;
		ip6 daddr fd00:96::1 tcp dport 443 dnat to [fd00::1]:6443
		meta l4proto tcp dnat ip6 to numgen random mod 1 map { 0 : fd00::5 . 8080 }
	}
}
table inet both {
	chain filter {
		type filter hook forward priority filter + 10; policy accept;
		ip saddr 10.0.0.0/8 accept
		ip6 saddr fd00::1 drop
		meta nfproto ipv6 accept
		tcp dport 22 accept
		meta l4proto tcp accept
		meta l4proto udp th dport 53 accept
		ip6 saddr fd00::/8 reject with icmpv6 no-route
		ip6 saddr fd00::/8 reject with icmpv6 addr-unreachable
		ip saddr 10.0.0.0/8 reject with icmp host-unreachable
		reject with icmpx admin-prohibited
		reject
	}
	chain nat {
		type nat hook output priority -100; policy accept;
		ip daddr 10.0.0.1 tcp dport 80 dnat ip to 10.0.0.2:81
		meta nfproto ipv4 tcp dport 81 redirect to :15001
		oifname != "lo" meta l4proto tcp ip6 daddr != ::1 redirect to :15001
	}
}
table ip asleep {
	flags dormant
	chain filter {
		type filter hook input priority filter; policy drop;
		tcp dport 80 accept
	}
}
table bridge frames {
	chain names { type filter hook prerouting priority dstnat; policy accept; }
	chain numbers { type filter hook forward priority 0; policy accept; }
}
"#;

fn many_forms_of_rules_are_read_as_nft_lists_them() -> Result<()> {
    let lab = lab()?;
    let node = lab.node("node1");
    load(node, "nft -f -", FORMS)?;
    for (family, table) in [
        ("ip", "four"),
        ("ip6", "six"),
        ("inet", "both"),
        ("ip", "asleep"),
    ] {
        same(node, family, table)?;
    }
    // The names of inet's priorities mean others there.
    let frames = ours(node, "bridge", "frames")?;
    ensure!(
        frames.contains("hook prerouting priority -300;")
            && frames.contains("hook forward priority 0;"),
        "{frames}"
    );
    Ok(())
}

fn a_rule_that_cannot_be_said_is_never_left_out() -> Result<()> {
    let lab = lab()?;
    let node = lab.node("node1");
    let rules = "table ip odd {\n\tquota q { 1000 bytes; }\n\tchain c {\n\t\ttype filter hook input priority filter; policy accept;\n\
        \t\ttcp dport 80 quota name \"q\" drop comment \"no\"\n\t\ttcp option maxseg size set 1000\n\t\tip dscp set 8\n\
        \t\tip dscp 8 accept\n\t\tmeta random 5 drop\n\
        \t\tip ttl 1 drop\n\t\ttcp dport 80 limit rate 10/second accept\n\t\ttcp option maxseg exists drop\n\
        \t\ticmp type echo-request ct count over 5 drop\n\t\ttcp flags & (syn | ack) == syn drop\n\t}\n}\n";
    load(node, "nft -f -", rules)?;
    let listing = ours(node, "ip", "odd")?;
    let rules: Vec<&str> = listing.lines().map(str::trim).skip(3).collect();
    ensure!(
        rules
            == [
                "# tcp dport 80 [objref] comment \"no\"",
                "# [exthdr]",
                "# [payload]",
                "@nh,8,8 & 0xfc == 0x20 accept",
                "# [meta]",
                "@nh,64,8 0x01 drop",
                "tcp dport 80 limit rate 10/second burst 5 packets accept",
                "tcp option @2 exists drop",
                "meta l4proto icmp @th,0,8 0x08 ct count over 5 drop",
                "meta l4proto tcp @th,104,8 & 0x12 == 0x02 drop",
                "}",
                "}"
            ],
        "{listing}"
    );
    // The family and the protocol that a field is of.
    let rules = "table inet fields {\n\tchain c {\n\t\ttype filter hook input priority filter; policy accept;\n\
        \t\tip saddr 10.0.0.0/8 ip ttl 64 drop\n\t\ticmp type echo-request icmp code 0 drop\n\
        \t\tip6 saddr fd00::/8 ip6 hoplimit 5 drop\n\t\tip6 nexthdr tcp tcp dport 80 drop\n\t\tmeta priority set 1:10\n\t}\n}\n";
    load(node, "nft -f -", rules)?;
    let listing = ours(node, "inet", "fields")?;
    let rules: Vec<&str> = listing.lines().map(str::trim).skip(3).collect();
    ensure!(
        rules
            == [
                "ip saddr 10.0.0.0/8 @nh,64,8 0x40 drop",
                "meta nfproto ipv4 meta l4proto icmp @th,0,16 0x0800 drop",
                "ip6 saddr fd00::/8 @nh,56,8 0x05 drop",
                "meta nfproto ipv6 ip6 nexthdr tcp th dport 80 drop",
                "# [meta]",
                "}",
                "}"
            ],
        "{listing}"
    );
    // A missing table is no empty one.
    ensure!(ours(node, "ip", "none").is_err());
    Ok(())
}

/// Two rules are always exchanged together: a reader that mixes two states sees none or both of one kind.
fn rules_that_change_are_read_as_of_one_moment() -> Result<()> {
    let lab = lab()?;
    let node = lab.node("node1");
    let table = |port: u16| {
        format!(
            "table ip moving\ndelete table ip moving\ntable ip moving {{\n\tset ports {{ type inet_service; elements = {{ {port} }}; }}\n\
             \tchain a {{ tcp dport {port} accept; }}\n\tchain b {{ tcp dport {port} accept; }}\n}}\n"
        )
    };
    load(node, "nft -f -", &table(1))?;
    let script = format!(
        "for i in $(seq 1 60); do nft -f - <<'end'\n{}end\nnft -f - <<'end'\n{}end\ndone",
        table(2),
        table(1)
    );
    let changes = std::thread::scope(|scope| {
        let changer = scope.spawn(|| node.command("sh").args(["-c", &script]).run());
        let mut readings = 0;
        while !changer.is_finished() {
            // The reader returns an error if the rules do not stand still.
            if let Ok(listing) = ours(node, "ip", "moving") {
                let of = |port: u16| listing.matches(&format!("dport {port} accept")).count();
                let element = |port: u16| listing.contains(&format!("elements = {{ {port} }}"));
                ensure!(
                    (of(1), of(2)) == (2, 0) && element(1)
                        || (of(1), of(2)) == (0, 2) && element(2),
                    "{listing}"
                );
                readings += 1;
            }
        }
        changer.join().ok().context("it panicked")??;
        Ok(readings)
    })?;
    ensure!(changes > 5, "{changes} readings");
    Ok(())
}

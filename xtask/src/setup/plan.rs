//! Decides which tools are missing for a chore, and how to install them. Pure: [`Found`] has the
//! tools of this machine.

use super::{
    found::Found,
    linker::{self, Llvm},
    program::{PROGRAMS, Purpose},
};

/// A step that installs a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Add the source of `core` to rustup's toolchain of this name.
    RustSrc(String),
    /// Install this package with apt.
    Package(String),
    /// Build [`Found::linker`].
    BpfLinker,
    /// Instructions for the user, if we cannot install the tool.
    ByHand(String),
}

/// A tool that a chore needs and this machine lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// Name of the tool, with the version if it matters.
    pub what: String,
    /// The reason why the tool is needed, and the unsuitable one that is installed instead.
    pub why: String,
    pub step: Step,
}

/// Returns the missing tools, in the order in which to install them.
pub fn missing(found: &Found, purpose: Purpose) -> Vec<Missing> {
    let mut missing = Vec::new();
    if !found.rust_src {
        missing.push(rust_src(found));
    }
    for program in PROGRAMS.iter().filter(|program| program.least <= purpose) {
        let listed = |m: &Missing| m.what == program.package;
        if !found.programs.contains(program.name) && !missing.iter().any(listed) {
            missing.push(Missing {
                what: program.package.to_owned(),
                why: format!("its `{}` {}", program.name, program.needed_for),
                step: package(found, program.package),
            });
        }
    }
    if !found.linker_works
        && !found
            .foreign
            .as_ref()
            .is_some_and(|f| f.fits(found.rustc.llvm))
    {
        missing.extend(bpf_linker(found));
    }
    missing
}

fn rust_src(found: &Found) -> Missing {
    let step = match &found.toolchain {
        Some(toolchain) => Step::RustSrc(toolchain.clone()),
        None => Step::ByHand(
            "this rustc is not rustup's: add the source of its standard library (on Debian and \
             Ubuntu the package rust-src), or use rustup, https://rustup.rs"
                .to_owned(),
        ),
    };
    Missing {
        what: "rust-src".to_owned(),
        why: "`core` is compiled from source for the kernel's instruction set".to_owned(),
        step,
    }
}

fn bpf_linker(found: &Found) -> Vec<Missing> {
    let (rustc, llvm) = (&found.rustc.release, found.rustc.llvm);
    let mut why = format!("links the kernel programs; rustc {rustc} writes bitcode of LLVM {llvm}");
    if let Some(foreign) = &found.foreign {
        why.push_str("; ");
        why.push_str(&foreign.described());
    }
    let linker = Missing {
        what: format!("bpf-linker {} for LLVM {llvm}", linker::VERSION),
        why,
        step: Step::BpfLinker,
    };
    if !linker::LLVMS.contains(&llvm) {
        let (least, most) = (linker::LLVMS.start(), linker::LLVMS.end());
        let step = Step::ByHand(format!(
            "bpf-linker {} can be built for LLVM {least} to {most}: use a rustc that has one of \
             these (`rustc -vV` tells)",
            linker::VERSION
        ));
        return vec![Missing { step, ..linker }];
    }
    if found.linker.llvm != Llvm::System(llvm) || found.llvms.contains(&llvm) {
        return vec![linker];
    }
    let present: Vec<String> = found.llvms.iter().map(u32::to_string).collect();
    let present = if present.is_empty() {
        "none".to_owned()
    } else {
        present.join(", ")
    };
    let package_name = format!("llvm-{llvm}-dev");
    vec![
        Missing {
            step: package(found, &package_name),
            what: package_name,
            why: format!(
                "bpf-linker is built against it; rustc {rustc} has LLVM {llvm} and does not bring \
                 it as a library; installed: {present}"
            ),
        },
        linker,
    ]
}

fn package(found: &Found, name: &str) -> Step {
    if found.apt {
        Step::Package(name.to_owned())
    } else {
        Step::ByHand(format!(
            "install what Debian calls {name} with this machine's package manager"
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use super::{
        super::{
            linker::{Foreign, Linker},
            rustc::Version,
        },
        *,
    };

    /// Returns a machine that has everything.
    fn complete() -> Found {
        let library = "/t/lib/libLLVM.so.22.1-rust-1.95.0-stable".into();
        Found {
            rustc: Version {
                release: "1.95.0".into(),
                llvm: 22,
            },
            toolchain: Some("stable".into()),
            rust_src: true,
            linker: Linker::new(Llvm::Toolchain(library), 22, Path::new("/c")),
            linker_works: true,
            foreign: None,
            llvms: BTreeSet::new(),
            programs: PROGRAMS.iter().map(|program| program.name).collect(),
            apt: true,
            root: true,
        }
    }

    fn steps(found: &Found, purpose: Purpose) -> Vec<Step> {
        missing(found, purpose)
            .into_iter()
            .map(|missing| missing.step)
            .collect()
    }

    fn package(name: &str) -> Step {
        Step::Package(name.into())
    }

    #[test]
    fn nothing_is_done_where_everything_is() {
        assert_eq!(missing(&complete(), Purpose::Bench), []);
    }

    #[test]
    fn each_purpose_asks_for_what_it_needs_and_a_package_once() {
        let bare = Found {
            rust_src: false,
            linker_works: false,
            programs: BTreeSet::new(),
            ..complete()
        };
        let source = Step::RustSrc("stable".into());
        assert_eq!(
            steps(&bare, Purpose::Build),
            [source.clone(), Step::BpfLinker]
        );
        assert_eq!(
            steps(&bare, Purpose::Lab),
            [source.clone(), package("iproute2"), Step::BpfLinker]
        );
        assert_eq!(
            steps(&bare, Purpose::Bench),
            [
                source,
                package("iproute2"),
                package("iptables"),
                package("nftables"),
                package("haproxy"),
                package("libnginx-mod-stream"),
                package("bind9-dnsutils"),
                package("unbound"),
                package("musl-tools"),
                package("hey"),
                Step::BpfLinker
            ]
        );
    }

    #[test]
    fn a_toolchain_without_its_llvm_takes_the_distributions() {
        let linker = Linker::new(Llvm::System(22), 22, Path::new("/c"));
        let without = Found {
            linker,
            linker_works: false,
            llvms: BTreeSet::from([14, 19]),
            ..complete()
        };
        let asked = missing(&without, Purpose::Build);
        assert_eq!(asked[0].step, package("llvm-22-dev"));
        assert!(
            asked[0].why.ends_with("installed: 14, 19"),
            "{}",
            asked[0].why
        );
        assert_eq!(asked[1].step, Step::BpfLinker);

        let with = Found {
            llvms: BTreeSet::from([14, 22]),
            ..without
        };
        assert_eq!(steps(&with, Purpose::Build), [Step::BpfLinker]);
    }

    #[test]
    fn a_linker_on_the_path_serves_if_it_is_the_right_one() {
        let with = |version: &str, llvm| Found {
            linker_works: false,
            foreign: Some(Foreign {
                program: "/usr/bin/bpf-linker".into(),
                version: Some(version.into()),
                llvm,
            }),
            ..complete()
        };
        assert_eq!(
            missing(&with(linker::VERSION, Some(22)), Purpose::Build),
            []
        );
        // A wrong version, a wrong LLVM or an unknown LLVM: the message names it, and the
        // bpf-linker that is needed.
        let old = missing(&with("0.9.14", Some(22)), Purpose::Build);
        assert_eq!(old[0].step, Step::BpfLinker);
        assert_eq!(old[0].what, "bpf-linker 0.13.0 for LLVM 22");
        assert!(
            old[0]
                .why
                .contains("/usr/bin/bpf-linker is bpf-linker 0.9.14"),
            "{}",
            old[0].why
        );
        assert_eq!(
            steps(&with(linker::VERSION, Some(21)), Purpose::Build),
            [Step::BpfLinker]
        );
        assert_eq!(
            steps(&with(linker::VERSION, None), Purpose::Build),
            [Step::BpfLinker]
        );
    }

    #[test]
    fn an_llvm_that_no_linker_knows_is_said_so() {
        let rustc = Version {
            release: "1.90.0".into(),
            llvm: 20,
        };
        let old = Found {
            rustc,
            linker_works: false,
            ..complete()
        };
        let asked = missing(&old, Purpose::Build);
        assert!(
            matches!(&asked[..], [Missing { step: Step::ByHand(how), .. }]
            if how.contains("LLVM 21 to 23"))
        );
    }

    #[test]
    fn nothing_is_tried_without_rustup_or_apt() {
        let foreign = Found {
            toolchain: None,
            rust_src: false,
            programs: BTreeSet::new(),
            apt: false,
            ..complete()
        };
        let steps = steps(&foreign, Purpose::Bench);
        assert_eq!(steps.len(), 10, "{steps:?}");
        assert!(
            steps.iter().all(|step| matches!(step, Step::ByHand(_))),
            "{steps:?}"
        );
    }
}

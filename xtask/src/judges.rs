//! `cargo xtask judges`: other programs of the field, built from their modules, to compare the dataplane with.
//!
//! Each set of programs has a module of its own in `tests/judges`, because no module can have two versions of
//! Kubernetes. A module pins versions and imports the programs. It contains none of their source.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result, anyhow};

use crate::{
    command::{on_path, output},
    progress::{self, note},
    workspace,
};

/// Programs of Kubernetes that every version has.
const KUBERNETES: &[&str] = &[
    "cmd/kube-apiserver",
    "cmd/kube-controller-manager",
    "cmd/kube-proxy",
    "cmd/kube-scheduler",
    "cmd/kubectl",
    "cmd/kubelet",
    "test/images/agnhost",
    "test/images/regression-issue-74839",
    E2E,
];
/// Kubernetes' own tests, which are compiled as a test program.
const E2E: &str = "test/e2e";

/// The sets of programs, by their directories in `tests/judges`.
const SETS: &[Set] = &[
    Set {
        name: "coredns",
        module: "github.com/coredns/coredns",
        packages: &[""],
        judges: "answers to DNS queries",
        needs: "",
    },
    Set {
        name: "istio",
        module: "istio.io/istio",
        packages: &[
            "pilot/cmd/pilot-discovery",
            "istioctl/cmd/istioctl",
            "./workloads",
        ],
        judges: "Istio's objects and policies, and its authority; istiod is pilot-discovery: `cargo xtask cluster istiod`",
        needs: "etcd, and kube-apiserver, kube-controller-manager and kubectl of kubernetes-1.36 to run",
    },
    Set {
        name: "kube-router",
        module: "github.com/cloudnativelabs/kube-router/v2",
        packages: &["cmd/kube-router"],
        judges: "network policies by iptables and ipset; `cargo xtask cluster run netpol` compares",
        needs: "iptables, ipset and kubernetes-1.36 to run",
    },
    Set {
        name: "kubernetes-1.36",
        module: "k8s.io/kubernetes",
        packages: KUBERNETES,
        judges: "services: kube-proxy, Kubernetes' own tests; what `cargo xtask cluster` runs",
        needs: "etcd, containerd, runc, CNI plug-ins to run",
    },
    Set {
        name: "kubernetes-1.37",
        module: "k8s.io/kubernetes",
        packages: KUBERNETES,
        judges: "the same, of the next version",
        needs: "as kubernetes-1.36",
    },
];

/// Build programs of the field, to compare the dataplane with
///
/// Builds the programs with the machine's `go` into `target/judges/SET/PROGRAM`. Without names, builds all. A name is
/// the name of a set, or SET/PROGRAM. The modules come from the Go module proxy, with the versions and checksums in
/// tests/judges. Without Go, prints this and exits with 0.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
    cargo xtask judges --list                        the sets, their versions, and the programs that are built
    cargo xtask judges coredns
    cargo xtask judges kubernetes-1.37/kube-proxy    this program alone
    cargo xtask judges kubernetes-1.36 && cargo xtask cluster run")]
pub struct Arguments {
    /// Sets, or programs of them as SET/PROGRAM
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Print the sets instead of building them
    #[arg(long)]
    list: bool,
}

/// A set of programs, built from one module.
struct Set {
    /// The set's directory in `tests/judges` and in `target/judges`.
    name: &'static str,
    /// The module that has the programs.
    module: &'static str,
    /// The programs' packages below the module. A package that begins with `./` is this project's own, in the set's
    /// directory.
    packages: &'static [&'static str],
    /// The subject on which the programs are compared with the dataplane.
    judges: &'static str,
    /// Other programs that they need.
    needs: &'static str,
}

/// A set and those of its packages that are to be built.
type Wanted = (&'static Set, Vec<&'static str>);

pub fn main(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.list {
        list()?;
        return Ok(ExitCode::SUCCESS);
    }
    let wanted = wanted(&arguments.names)?;
    if on_path("go").is_none() {
        println!("skipped judges: there is no `go` on the search path; they need Go 1.26 or newer");
        return Ok(ExitCode::SUCCESS);
    }
    for (set, packages) in wanted {
        set.build(&packages)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the directory of the built programs of a set.
pub fn directory(set: &str) -> PathBuf {
    workspace::target().join("judges").join(set)
}

/// Returns the directory of a module that a set uses, for files in it that are no program, such as definitions of
/// resources.
///
/// # Errors
/// Fails if Go does not find the module.
pub fn module_directory(set: &str, module: &str) -> Result<PathBuf> {
    let set = SETS.iter().find(|known| known.name == set);
    set.context("a set's name")?.module_directory(module)
}

/// Finds the sets and programs with these names; without names, all.
fn wanted(names: &[String]) -> Result<Vec<Wanted>> {
    if names.is_empty() {
        return Ok(SETS
            .iter()
            .map(|set| (set, set.packages.to_vec()))
            .collect());
    }
    let found = names.iter().map(|name| {
        let (set, program) = match name.split_once('/') {
            Some((set, program)) => (set, Some(program)),
            None => (name.as_str(), None),
        };
        let unknown = || anyhow!("there is no judge {name}: `cargo xtask judges --list` has all");
        let set = SETS
            .iter()
            .find(|known| known.name == set)
            .with_context(unknown)?;
        let is_wanted = |package: &&&str| program.is_none_or(|name| set.program(package) == name);
        let packages: Vec<&str> = set.packages.iter().filter(is_wanted).copied().collect();
        if packages.is_empty() {
            return Err(unknown());
        }
        Ok((set, packages))
    });
    found.collect()
}

fn list() -> Result<()> {
    anstream::println!("{:<16} {:<38} BUILT", "SET", "VERSION");
    for set in SETS {
        let programs = || set.packages.iter().map(|package| set.program(package));
        let built: Vec<&str> = programs().filter(|name| set.file(name).is_file()).collect();
        let built = match built.len() {
            0 => "no".to_owned(),
            count if count == set.packages.len() => "yes".to_owned(),
            _ => built.join(", "),
        };
        anstream::println!("{:<16} {:<38} {built}", set.name, set.version()?);
        anstream::println!("    judges {}", set.judges);
        let names: Vec<&str> = programs().collect();
        anstream::println!("    programs: {}", names.join(", "));
        if !set.needs.is_empty() {
            anstream::println!("    needs {}", set.needs);
        }
    }
    Ok(())
}

impl Set {
    /// Returns the name of the program that a package becomes.
    fn program(&self, package: &str) -> &'static str {
        match package {
            E2E => "e2e.test",
            // The module itself is the program.
            "" => self.module.rsplit('/').next().unwrap_or(self.module),
            _ => {
                let mut packages = self.packages.iter().filter(|known| **known == package);
                let known = packages.next().copied().unwrap_or_default();
                known.rsplit('/').next().unwrap_or(known)
            }
        }
    }

    /// Returns the path of a built program.
    fn file(&self, program: &str) -> PathBuf {
        directory(self.name).join(program)
    }

    /// Returns the directory of the set's `go.mod`.
    fn source(&self) -> PathBuf {
        workspace::root().join("tests/judges").join(self.name)
    }

    /// Returns the pinned version.
    fn version(&self) -> Result<String> {
        let path = self.source().join("go.mod");
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let line = text.lines().find_map(|line| {
            let line = line.trim().trim_start_matches("require ");
            line.strip_prefix(self.module)?.strip_prefix(' ')
        });
        let line =
            line.with_context(|| format!("{} does not require {}", path.display(), self.module))?;
        Ok(line
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned())
    }

    fn build(&self, packages: &[&str]) -> Result<()> {
        let version = self.version()?;
        let to = directory(self.name);
        fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
        note(&format!(
            "{} {version} into {}",
            self.name,
            shown_target(&to)
        ));
        // Download the modules first, so that an error shows which of the two steps failed.
        progress::run(
            &format!("{}: download the modules", self.name),
            self.go().args(["mod", "download"]),
        )?;
        for package in packages {
            let program = self.program(package);
            let mut go = self.go();
            if *package == E2E {
                // Without -vet=off, go first vets every package of the tests.
                go.args(["test", "-c", "-vet=off"]);
            } else {
                go.arg("build");
            }
            go.args([
                "-trimpath",
                "-buildvcs=false",
                "-ldflags",
                &self.flags(&version),
            ]);
            go.arg("-o").arg(self.file(program)).arg(self.path(package));
            progress::run(&format!("{}: {program}", self.name), &mut go)?;
        }
        Ok(())
    }

    /// Returns the import path of a package.
    fn path(&self, package: &str) -> String {
        if package.is_empty() {
            self.module.to_owned()
        } else if package.starts_with("./") {
            package.to_owned()
        } else {
            format!("{}/{package}", self.module)
        }
    }

    /// Returns the linker's flags. Kubernetes' programs ask each other for their versions.
    fn flags(&self, version: &str) -> String {
        if self.module != "k8s.io/kubernetes" {
            return "-s -w".to_owned();
        }
        let minor = version.split('.').nth(1).unwrap_or_default();
        let name = "k8s.io/component-base/version.git";
        format!("-s -w -X {name}Version={version} -X {name}Major=1 -X {name}Minor={minor}")
    }

    /// Returns the directory of a module that the set uses.
    fn module_directory(&self, module: &str) -> Result<PathBuf> {
        let mut go = self.go();
        go.args(["list", "-m", "-f", "{{.Dir}}", module]);
        Ok(output(&mut go)?.trim().into())
    }

    /// Returns a `go` command in the module's directory, with exactly the pinned versions and the machine's own
    /// toolchain.
    fn go(&self) -> Command {
        let mut go = Command::new("go");
        go.current_dir(self.source())
            .env("GOFLAGS", "-mod=readonly")
            .env("GOWORK", "off")
            .env("GOTOOLCHAIN", "local")
            .env("CGO_ENABLED", "0");
        go
    }
}

/// Returns a path in the target directory, relative to the clone's top.
fn shown_target(path: &Path) -> String {
    let below = path.strip_prefix(workspace::root()).unwrap_or(path);
    below.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_pins_its_module_and_imports_its_programs() {
        for set in SETS {
            assert!(set.version().unwrap().starts_with('v'), "{}", set.name);
            let file = set.source().join("programs.go");
            let imports = fs::read_to_string(file).unwrap();
            let others = |package: &&&str| !package.starts_with("./");
            for package in set.packages.iter().filter(others) {
                let path = format!("\"{}\"", set.path(package));
                assert!(imports.contains(&path), "{}: {path}", set.name);
            }
        }
    }

    #[test]
    fn a_name_is_a_set_or_a_program_of_a_set() {
        let programs = |name: &str| -> Result<Vec<&str>> {
            let wanted = wanted(&[name.to_owned()])?;
            let named = wanted
                .iter()
                .flat_map(|(set, packages)| packages.iter().map(|package| set.program(package)));
            Ok(named.collect())
        };
        assert_eq!(programs("coredns").unwrap(), ["coredns"]);
        assert_eq!(programs("kubernetes-1.36/e2e.test").unwrap(), ["e2e.test"]);
        let istio = ["pilot-discovery", "istioctl", "workloads"];
        assert_eq!(programs("istio").unwrap(), istio);
        for unknown in ["dns", "istio/ztunnel", "coredns/"] {
            let error = programs(unknown).unwrap_err().to_string();
            assert!(
                error.contains(unknown) && error.contains("--list"),
                "{error}"
            );
        }
    }
}

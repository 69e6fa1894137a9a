//! Gets the rules of a network namespace as text: those of iptables from the programs that can print them, and those of nf_tables
//! from the kernel.

use std::{io, path::Path, time::Duration};

use kernel::netfilter::{self, Kind, Table};

use super::{
    binaries::{self, Binaries, Family, Role, Variant},
    detect::{self, GET_IPTABLES, GET_NFT},
    ruleset::{Form, Text},
};

/// How long a program may take to print all rules: legacy tables wait for a lock.
const PATIENCE: Duration = Duration::from_mins(1);

/// How much it may print: a million rules of kube-proxy.
const LIMIT: u64 = 256 * 1024 * 1024;

/// A text with rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Printed {
    /// Which program printed it, or whose words it has: `iptables-nft`, `nft`.
    pub origin: String,
    /// Its form.
    pub form: Form,
    /// The text.
    pub text: String,
}

impl Printed {
    /// For reading.
    pub fn as_text(&self) -> Text<'_> {
        Text {
            origin: &self.origin,
            form: self.form,
            text: &self.text,
        }
    }
}

/// The rules, and tables whose rules could not be had, with what to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// The rules.
    pub texts: Vec<Printed>,
    /// What is missing.
    pub missing: Vec<String>,
}

/// How tables of nf_tables are read that iptables does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Native {
    /// They are not.
    Leave,
    /// From the kernel, which needs no program: without what rules remember, and with a remark in place of a rule that this
    /// program cannot say.
    Read,
    /// By `nft`, which can restore what it prints.
    Save,
}

/// Prints every table of iptables that holds rules, and native tables of nf_tables as `native` says. To be called in the network namespace that has them.
///
/// # Errors
/// If `root` cannot be made the root of a thread.
pub fn collect(
    root: Option<&Path>,
    found: &Binaries,
    tables: &[Table],
    native: Native,
) -> io::Result<Collected> {
    binaries::below(root, || {
        let mut all = Collected::default();
        for family in Family::BOTH {
            for (variant, kind) in [
                (Variant::Legacy, Kind::Legacy),
                (Variant::Nft, Kind::Compat),
            ] {
                let held = tables.iter().filter(|table| {
                    (table.kind, table.family) == (kind, family.of_tables()) && table.holds_rules()
                });
                all.saved(found, family, variant, &held.collect::<Vec<_>>());
            }
        }
        for table in tables.iter().filter(|table| table.kind == Kind::Native) {
            match (native, &found.nft) {
                (Native::Leave, _) => {}
                (Native::Read, _) => {
                    all.listed(table);
                }
                (Native::Save, Some(nft)) => all.printed(table, &nft.path),
                (Native::Save, None) => {
                    let why = format!("no nft is here, by which it could be restored: {GET_NFT}");
                    all.miss(table, &why);
                }
            }
        }
        Ok(all)
    })
}

/// Reads all rules of the network namespace that this thread is in, from the kernel where no program is needed.
///
/// # Errors
/// The tables cannot be listed, or `root` cannot be made the root of a thread.
pub fn all(root: Option<&Path>) -> io::Result<Collected> {
    let tables = netfilter::tables().map_err(io::Error::other)?;
    let found = binaries::find(root)?;
    collect(root, &found, &tables, Native::Read)
}

impl Collected {
    fn miss(&mut self, table: &Table, why: &str) {
        let kind = match table.kind {
            Kind::Legacy => "legacy table",
            Kind::Compat => "compatibility table",
            Kind::Native => "nf_tables table",
        };
        let table = format!("{} {}", table.family, detect::summary(table));
        self.missing.push(format!("{kind} {table}: {why}"));
    }

    /// The tables of one family in one variant.
    fn saved(&mut self, found: &Binaries, family: Family, variant: Variant, tables: &[&Table]) {
        if tables.is_empty() {
            return;
        }
        let Some(save) = found.program(family, variant, Role::Save) else {
            let name = binaries::name(family, Some(variant), Role::Save);
            for table in tables {
                // nf_tables shows compatibility tables as well, but not what extensions of iptables do.
                let listed = variant == Variant::Nft && self.listed(table);
                let listed = if listed {
                    ", so only what nf_tables shows of it was read"
                } else {
                    ""
                };
                self.miss(table, &format!("no {name} is here{listed}: {GET_IPTABLES}"));
            }
            return;
        };
        let origin = binaries::name(family, Some(variant), Role::Command);
        let (mut lacking, mut why) = (tables.to_vec(), String::new());
        match print(&save.path, &[]) {
            Ok(text) => {
                lacking.retain(|table| !has(&text, table));
                self.push(&origin, text);
            }
            Err(error) => why = error.to_string(),
        }
        // Below a root without /proc, legacy programs find no table by themselves; and those of nft leave out a table that has
        // rules of nft's own.
        for table in lacking {
            match print(&save.path, &["-t", &table.name]) {
                Ok(text) if has(&text, table) => self.push(&origin, text),
                Ok(_) if why.is_empty() => {
                    let listed = variant == Variant::Nft && self.listed(table);
                    let listed = if listed {
                        ", so only what nf_tables shows of it was read"
                    } else {
                        ""
                    };
                    self.miss(
                        table,
                        &format!("{} prints nothing of it{listed}", save.path.display()),
                    );
                }
                Ok(_) => self.miss(table, &format!("{}: {why}", save.path.display())),
                Err(error) => self.miss(table, &format!("{}: {error}", save.path.display())),
            }
        }
    }

    fn push(&mut self, origin: &str, text: String) {
        self.texts.push(Printed {
            origin: origin.to_owned(),
            form: Form::Saved,
            text,
        });
    }

    /// One table of nf_tables, as `nft` prints it.
    fn printed(&mut self, table: &Table, nft: &Path) {
        match print(nft, &["list", "table", table.family, &table.name]) {
            Ok(text) => self.texts.push(Printed {
                origin: "nft".to_owned(),
                form: Form::Nft,
                text,
            }),
            Err(error) => self.miss(table, &format!("{}: {error}", nft.display())),
        }
    }

    /// One table of nf_tables, as the kernel has it; false if it cannot be read, which is then said.
    fn listed(&mut self, table: &Table) -> bool {
        match netfilter::listed(table.family, &table.name) {
            Ok(text) => self.texts.push(Printed {
                origin: "nft".to_owned(),
                form: Form::Nft,
                text,
            }),
            Err(error) => {
                self.miss(table, &error.to_string());
                return false;
            }
        }
        true
    }
}

/// Whether a text of `iptables-save` has a table.
fn has(text: &str, table: &Table) -> bool {
    let mut names = text.lines().filter_map(|line| line.strip_prefix('*'));
    names.any(|name| name.trim() == table.name)
}

fn print(program: &Path, arguments: &[&str]) -> io::Result<String> {
    let said = binaries::run(program, arguments, PATIENCE, LIMIT)?;
    if !said.success {
        let why = said.stderr.lines().next();
        let why = why.unwrap_or("it failed without a word");
        // Legacy programs open a raw socket.
        let hint = if why.contains("you must be root") {
            "; it needs CAP_NET_ADMIN, and CAP_NET_RAW for legacy tables"
        } else {
            ""
        };
        return Err(io::Error::other(format!("{why}{hint}")));
    }
    // Names of users and chains may be of any bytes.
    Ok(String::from_utf8(said.stdout)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

//! Reads the rules of a network namespace as text, with the programs of iptables and with `nft`.

use std::{io, path::Path, time::Duration};

use kernel::netfilter::{self, Kind, Table};

use super::{
    binaries::{self, Binaries, Family, Role, Variant},
    detect::{self, GET_IPTABLES, GET_NFT},
    ruleset::{Form, Text},
};

/// Maximum time for a program to print all rules. It is long because programs for legacy tables wait for a lock.
const PATIENCE: Duration = Duration::from_mins(1);

/// Maximum output in bytes: enough for a million rules of kube-proxy.
const LIMIT: u64 = 256 * 1024 * 1024;

/// A text with rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Printed {
    /// The program that printed the text: `iptables-nft`, `nft`.
    pub origin: String,
    /// The form.
    pub form: Form,
    /// The text.
    pub text: String,
}

impl Printed {
    /// Returns the text for reading.
    pub fn as_text(&self) -> Text<'_> {
        Text {
            origin: &self.origin,
            form: self.form,
            text: &self.text,
        }
    }
}

/// The rules that were read, and the tables whose rules could not be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// The rules.
    pub texts: Vec<Printed>,
    /// The tables that could not be read, each with the reason and the remedy.
    pub missing: Vec<String>,
}

/// Whether to read the native tables of nf_tables, which iptables does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Native {
    /// Does not read them.
    Leave,
    /// Reads them with `nft`, which can also restore its own output.
    Print,
}

/// Prints every table of iptables that has rules, and native tables of nf_tables according to `native`. Call it in the
/// network namespace of the tables.
///
/// # Errors
/// If the thread cannot change its root to `root`.
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
        let native = tables
            .iter()
            .filter(|table| table.kind == Kind::Native && native == Native::Print);
        for table in native {
            all.printed(found, table);
        }
        Ok(all)
    })
}

/// Reads all rules in the network namespace of this thread, with the programs found below `root` or in `PATH`.
///
/// # Errors
/// If the tables cannot be listed, or the thread cannot change its root to `root`.
pub fn all(root: Option<&Path>) -> io::Result<Collected> {
    let tables = netfilter::tables().map_err(io::Error::other)?;
    let found = binaries::find(root)?;
    collect(root, &found, &tables, Native::Print)
}

impl Collected {
    /// Returns the rules if all of them could be read: one text for each program of iptables, with its tables joined,
    /// and one text for each table that `nft` printed.
    ///
    /// # Errors
    /// If a table could not be read.
    pub fn whole(self) -> io::Result<Vec<Printed>> {
        match self.missing.first() {
            Some(missing) => Err(io::Error::other(format!(
                "cannot read all rules: {missing}"
            ))),
            None => Ok(joined(self.texts)),
        }
    }

    fn miss(&mut self, table: &Table, why: &str) {
        let kind = match table.kind {
            Kind::Legacy => "legacy table",
            Kind::Compat => "compatibility table",
            Kind::Native => "nf_tables table",
        };
        let table = format!("{} {}", table.family, detect::summary(table));
        self.missing.push(format!("{kind} {table}: {why}"));
    }

    /// Prints the tables of one family and variant.
    fn saved(&mut self, found: &Binaries, family: Family, variant: Variant, tables: &[&Table]) {
        if tables.is_empty() {
            return;
        }
        let Some(save) = found.program(family, variant, Role::Save) else {
            let name = binaries::name(family, Some(variant), Role::Save);
            for table in tables {
                let listed = self.listed(found, variant, table);
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
        // Below a root without /proc, legacy programs do not find the tables themselves. The nft programs omit a table
        // that also has native rules of nft.
        for table in lacking {
            match print(&save.path, &["-t", &table.name]) {
                Ok(text) if has(&text, table) => self.push(&origin, text),
                Ok(_) if why.is_empty() => {
                    let listed = self.listed(found, variant, table);
                    let program = save.path.display();
                    self.miss(table, &format!("{program} prints nothing of it{listed}"));
                }
                Ok(_) => self.miss(table, &format!("{}: {why}", save.path.display())),
                Err(error) => self.miss(table, &format!("{}: {error}", save.path.display())),
            }
        }
    }

    /// Reads, with `nft`, a table that iptables does not print, and returns a remark about it. nf_tables also shows
    /// compatibility tables, but not the effect of iptables' extensions.
    fn listed(&mut self, found: &Binaries, variant: Variant, table: &Table) -> &'static str {
        if variant == Variant::Nft && self.printed(found, table) {
            ", so only what nf_tables shows of it was read"
        } else {
            ""
        }
    }

    fn push(&mut self, origin: &str, text: String) {
        self.texts.push(Printed {
            origin: origin.to_owned(),
            form: Form::Saved,
            text,
        });
    }

    /// Prints one table of nf_tables with `nft`. Returns false if that fails; the table is then among the missing ones.
    fn printed(&mut self, found: &Binaries, table: &Table) -> bool {
        let Some(nft) = &found.nft else {
            self.miss(table, &format!("no nft is here: {GET_NFT}"));
            return false;
        };
        match print(&nft.path, &["list", "table", table.family, &table.name]) {
            Ok(text) => self.texts.push(Printed {
                origin: "nft".to_owned(),
                form: Form::Nft,
                text,
            }),
            Err(error) => {
                self.miss(table, &format!("{}: {error}", nft.path.display()));
                return false;
            }
        }
        true
    }
}

/// Joins the tables that one program of iptables printed separately into one text.
pub fn joined(printed: Vec<Printed>) -> Vec<Printed> {
    let mut texts: Vec<Printed> = Vec::new();
    for printed in printed {
        let mut known = texts.iter_mut();
        let is_same = |known: &&mut Printed| {
            printed.form == Form::Saved
                && known.form == Form::Saved
                && known.origin == printed.origin
        };
        match known.find(is_same) {
            Some(known) => known.text.push_str(&printed.text),
            None => texts.push(printed),
        }
    }
    texts
}

/// Returns true if a text of `iptables-save` contains a table.
fn has(text: &str, table: &Table) -> bool {
    let mut names = text.lines().filter_map(|line| line.strip_prefix('*'));
    names.any(|name| name.trim() == table.name)
}

fn print(program: &Path, arguments: &[&str]) -> io::Result<String> {
    let said = binaries::run(program, arguments, PATIENCE, LIMIT)?;
    if !said.success {
        let why = said.stderr.lines().next();
        let why = why.unwrap_or("it failed without a word");
        // Programs for legacy tables open a raw socket.
        let hint = if why.contains("you must be root") {
            "; it needs CAP_NET_ADMIN, and CAP_NET_RAW for legacy tables"
        } else {
            ""
        };
        return Err(io::Error::other(format!("{why}{hint}")));
    }
    // Names of users and chains may contain any bytes.
    Ok(String::from_utf8(said.stdout)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

//! Gets the rules of a network namespace as text, from the programs that can print them: those of iptables, and `nft`.

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
    /// Which program printed it: `iptables-nft`, `nft`.
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

/// Whether tables of nf_tables are read that iptables does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Native {
    /// They are not.
    Leave,
    /// By `nft`, which can restore what it prints.
    Print,
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
        let native = tables
            .iter()
            .filter(|table| table.kind == Kind::Native && native == Native::Print);
        for table in native {
            all.printed(found, table);
        }
        Ok(all)
    })
}

/// Reads all rules of the network namespace that this thread is in, by the programs that are here.
///
/// # Errors
/// The tables cannot be listed, or `root` cannot be made the root of a thread.
pub fn all(root: Option<&Path>) -> io::Result<Collected> {
    let tables = netfilter::tables().map_err(io::Error::other)?;
    let found = binaries::find(root)?;
    collect(root, &found, &tables, Native::Print)
}

impl Collected {
    /// The rules, if all could be read: a text for each program of iptables, which may have printed one table after the other, and one
    /// for each table that `nft` printed.
    ///
    /// # Errors
    /// Some could not be read.
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

    /// The tables of one family in one variant.
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
        // Below a root without /proc, legacy programs find no table by themselves; and those of nft leave out a table that has
        // rules of nft's own.
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

    /// Reads a table that iptables does not print, and says so. nf_tables shows compatibility tables as well, but not what
    /// extensions of iptables do.
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

    /// One table of nf_tables, as `nft` prints it; false if it cannot be read, which is then said.
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

/// Joins the tables that one program of iptables printed one by one into one text.
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

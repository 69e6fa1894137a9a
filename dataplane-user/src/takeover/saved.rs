//! The rules of an owner as they are before a take-over: read from the kernel, kept in a file, and brought back.

use std::{
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

use super::{
    binaries::{self, Binaries},
    cleanup::{By, Step, restore_program},
    collect::{self, Printed},
    journal, may_die,
    owners::{self, Owner},
    restore,
    ruleset::{self, Form},
};
use crate::kernel::netfilter::{self, Kind, Table};

/// How a section of the file begins. The origin of the section follows: a program's name.
const SECTION: &str = "# Saved by `dataplane takeover`: ";

/// Rules as they were.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// What each program printed.
    texts: Vec<Printed>,
}

/// How many rules there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Count {
    /// The program that printed them, with the table if it is of nf_tables alone: `iptables-nft`, `nft ip kube-proxy`.
    pub origin: String,
    /// The owner's chains, or those of the owner's tables.
    pub chains: usize,
    /// Rules in chains of others that lead there.
    pub jumps: usize,
}

impl Saved {
    /// Prints the rules of `owners` that are in the kernel, of the network namespace that this thread is in, with the rules of others
    /// between them.
    ///
    /// # Errors
    /// Rules cannot be read, or a line is not understood.
    pub fn of_kernel(owners: &[&Owner]) -> io::Result<Self> {
        let found = binaries::find(None)?;
        Self::printed(&found, owners)
    }

    fn printed(found: &Binaries, owners: &[&Owner]) -> io::Result<Self> {
        let mut tables = netfilter::tables().map_err(io::Error::other)?;
        tables.retain(|table| table.kind != Kind::Native || is_of(table, owners));
        let collected = collect::collect(None, found, &tables, true)?;
        if let Some(missing) = collected.missing.first() {
            return Err(io::Error::other(format!(
                "cannot read all rules: {missing}"
            )));
        }
        // A program that prints nothing of all tables at once prints each.
        let mut texts: Vec<Printed> = Vec::new();
        for printed in collected.texts {
            let mut known = texts.iter_mut().filter(|_| printed.form == Form::Saved);
            match known.find(|known| known.form == Form::Saved && known.origin == printed.origin) {
                Some(known) => known.text.push_str(&printed.text),
                None => texts.push(printed),
            }
        }
        let mut saved = Self::default();
        for printed in texts {
            if printed.form == Form::Nft || count(&printed, owners)?.chains > 0 {
                saved.texts.push(printed);
            }
        }
        Ok(saved)
    }

    /// The texts, each with the program that printed it.
    pub fn into_printed(self) -> Vec<Printed> {
        self.texts
    }

    /// Whether the owners have no rules.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// How many there are, for each program that printed some.
    ///
    /// # Errors
    /// A line is not understood.
    pub fn counts(&self, owners: &[&Owner]) -> io::Result<Vec<Count>> {
        self.texts.iter().map(|text| count(text, owners)).collect()
    }

    /// Whether both iptables and nf_tables' own tables have rules.
    pub fn is_mixed(&self) -> bool {
        let first = self.texts.first().map(|text| text.form);
        self.texts.iter().any(|text| Some(text.form) != first)
    }

    /// Writes the rules to a file, in one step and onto the disk. Returns the file's SHA-256.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<String> {
        let text = self.to_text();
        journal::replace(path, &text)?;
        Ok(sha256(&text))
    }

    fn to_text(&self) -> String {
        let mut all = String::new();
        for printed in &self.texts {
            // A String takes everything.
            let _ = writeln!(all, "{SECTION}{}", printed.origin);
            all += printed.text.trim_end();
            all.push('\n');
        }
        all
    }

    /// Reads a file that [`Saved::write`] wrote. With a checksum, the file must have it.
    ///
    /// # Errors
    /// The file cannot be read, has another checksum, or was not written so.
    pub fn read(path: &Path, wanted: Option<&str>) -> io::Result<Self> {
        let error = |why: String| io::Error::other(format!("{}: {why}", path.display()));
        let text = fs::read_to_string(path).map_err(|why| error(why.to_string()))?;
        if let Some(wanted) = wanted {
            let has = sha256(&text);
            if has != wanted {
                return Err(error(format!(
                    "the SHA-256 is {has}, and was {wanted} when the rules were saved: the file was changed"
                )));
            }
        }
        Self::of_text(&text).map_err(error)
    }

    fn of_text(text: &str) -> Result<Self, String> {
        let mut saved = Self::default();
        for line in text.split_inclusive('\n') {
            if let Some(origin) = line.strip_prefix(SECTION) {
                let origin = origin.trim_end().to_owned();
                let form = if origin == "nft" {
                    Form::Nft
                } else {
                    Form::Saved
                };
                let text = String::new();
                saved.texts.push(Printed { origin, form, text });
            } else if let Some(printed) = saved.texts.last_mut() {
                printed.text += line;
            } else {
                return Err(format!(
                    "was not written by `dataplane takeover`: it begins with {}",
                    line.trim_end()
                ));
            }
        }
        if saved.is_empty() {
            return Err("has no rules".to_owned());
        }
        Ok(saved)
    }

    /// Brings the rules back, into what is there now.
    ///
    /// # Errors
    /// Rules cannot be read, a program is missing or refuses, or rules are still missing then.
    pub fn bring_back(&self, owners: &[&Owner], dry_run: bool) -> io::Result<Back> {
        let found = binaries::find(None)?;
        let (steps, lost) = self.missing(&found, owners)?;
        let mut back = Back {
            steps: Vec::new(),
            lost,
        };
        for (step, by) in steps {
            if !dry_run {
                may_die();
                by.run(None, &step)?;
                may_die();
            }
            back.steps.push(step);
        }
        if !dry_run
            && let (left, _) = self.missing(&found, owners)?
            && let Some((step, _)) = left.first()
        {
            return Err(io::Error::other(format!(
                "rules are missing although {} succeeded",
                step.command
            )));
        }
        Ok(back)
    }

    /// What brings back what is missing.
    fn missing(
        &self,
        found: &Binaries,
        owners: &[&Owner],
    ) -> io::Result<(Vec<(Step, By)>, Vec<String>)> {
        let tables = netfilter::tables().map_err(io::Error::other)?;
        let of_iptables: Vec<Table> = (tables.iter())
            .filter(|table| table.kind != Kind::Native)
            .cloned()
            .collect();
        let now = collect::collect(None, found, &of_iptables, false)?;
        if let Some(missing) = now.missing.first() {
            return Err(io::Error::other(format!(
                "cannot read all rules: {missing}"
            )));
        }
        let (mut steps, mut lost) = (Vec::new(), Vec::new());
        for text in &self.texts {
            if text.form == Form::Nft {
                steps.extend(listed(text, found, &tables)?);
                continue;
            }
            let of_program = now.texts.iter().filter(|now| now.origin == text.origin);
            let there: String = of_program.map(|now| now.text.as_str()).collect();
            let there = Printed {
                text: there,
                ..text.clone()
            };
            let back = restore::plan(&text.as_text(), &there.as_text(), owners);
            let back =
                back.map_err(|why| io::Error::other(format!("a rule is not understood: {why}")))?;
            lost.extend(back.lost);
            if back.input.is_empty() {
                continue;
            }
            let program = restore_program(found, &text.origin)?;
            let step = Step {
                command: format!("{}-restore --noflush", text.origin),
                input: back.input,
                jumps: back.jumps,
                chains: back.chains,
            };
            steps.push((step, By::Restore(program)));
        }
        Ok((steps, lost))
    }
}

/// What was brought back, or would be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Back {
    /// The changes.
    pub steps: Vec<Step>,
    /// Rules that cannot come back, and why.
    pub lost: Vec<String>,
}

/// What brings back a table that `nft` printed, unless it is there with as many chains and rules.
fn listed(text: &Printed, found: &Binaries, tables: &[Table]) -> io::Result<Option<(Step, By)>> {
    let (saved, _) = ruleset::read(&[text.as_text()]);
    let [table] = &saved[..] else {
        return Err(io::Error::other("a text of nft has other than one table"));
    };
    let is_there = tables.iter().any(|now| {
        let name = format!("{} {}", now.family, now.name);
        now.kind == Kind::Native
            && name == table.name
            && (now.chains.len(), now.rules()) == (table.chains.len(), table.rules.len())
    });
    if is_there {
        return Ok(None);
    }
    let Some(nft) = &found.nft else {
        return Err(io::Error::other(format!(
            "no nft is here: {}",
            super::detect::GET_NFT
        )));
    };
    let name = &table.name;
    // One transaction: a part that is there gives way to the whole.
    let input = format!("add table {name}\ndelete table {name}\n{}", text.text);
    let step = Step {
        command: "nft -f -".to_owned(),
        input,
        jumps: 0,
        chains: table.chains.len(),
    };
    Ok(Some((step, By::Nft(nft.path.clone()))))
}

fn is_of(table: &Table, owners: &[&Owner]) -> bool {
    owners::of_table(&table.name).is_some_and(|owner| owners.contains(&owner))
}

fn count(printed: &Printed, owners: &[&Owner]) -> io::Result<Count> {
    let origin = printed.origin.clone();
    if printed.form == Form::Nft {
        let (tables, _) = ruleset::read(&[printed.as_text()]);
        let chains = tables.iter().map(|table| table.chains.len()).sum();
        let names: Vec<&str> = tables.iter().map(|table| table.name.as_str()).collect();
        return Ok(Count {
            origin: format!("{origin} {}", names.join(", ")),
            chains,
            jumps: 0,
        });
    }
    let removal = super::cleanup::plan(&printed.as_text(), owners);
    let removal =
        removal.map_err(|why| io::Error::other(format!("a rule is not understood: {why}")))?;
    Ok(Count {
        origin,
        chains: removal.chains,
        jumps: removal.jumps,
    })
}

fn sha256(text: &str) -> String {
    format!("{:x}", Sha256::digest(text.as_bytes()))
}

/// The name of a new file for rules that are saved now, and when that is.
pub fn new_file(directory: &Path) -> (PathBuf, String) {
    let now = jiff::Timestamp::now()
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .to_string();
    (
        directory.join(format!("rules-{}", now.replace(':', ""))),
        now,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_what_was_changed_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rules");
        let printed = |origin: &str, form, text: &str| Printed {
            origin: origin.to_owned(),
            form,
            text: text.to_owned(),
        };
        let saved = Saved {
            texts: vec![
                printed(
                    "iptables-legacy",
                    Form::Saved,
                    "*nat\n-A OUTPUT -j KUBE-SERVICES\nCOMMIT\n",
                ),
                printed("nft", Form::Nft, "table ip kube-proxy {\n}\n"),
            ],
        };
        let sum = saved.write(&path).unwrap();
        assert_eq!(Saved::read(&path, Some(&sum)).unwrap(), saved);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("OUTPUT", "INPUT")).unwrap();
        let why = Saved::read(&path, Some(&sum)).unwrap_err().to_string();
        assert!(why.contains("was changed"), "{why}");
        for other in ["", "*nat\nCOMMIT\n"] {
            fs::write(&path, other).unwrap();
            assert!(Saved::read(&path, None).is_err(), "{other}");
        }
    }
}

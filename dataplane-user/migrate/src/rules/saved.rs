//! The rules of an owner before a take-over: reads them from the kernel, stores them in a file, and restores them.

use std::{
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
};

use kernel::netfilter::{self, Kind};
use sha2::{Digest as _, Sha256};
use takeover::{disk, journal::Journal, may_die, owners::Owner};

use super::{
    binaries::{self, Binaries},
    cleanup::{self, By, Step, by_restore, is_of},
    collect::{self, Printed},
    restore,
    ruleset::{self, Form, Text},
};

/// Prefix of a section's first line. The origin of the section follows: the name of the program that printed it. The
/// text names `dataplane takeover`, because the command was part of `dataplane` when the format was defined.
const SECTION: &str = "# Saved by `dataplane takeover`: ";

/// The last line of the file.
const END: &str = "# The end of what `dataplane takeover` saved\n";
/// Maximum number of readings. Two consecutive readings must be equal.
const READS: usize = 5;

/// The saved rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// The output of each program.
    texts: Vec<Printed>,
}

/// The number of chains and rules in the output of one program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Count {
    /// The program that printed the rules. For a native table, the table's name follows: `iptables-nft`,
    /// `nft ip kube-proxy`.
    pub origin: String,
    /// Number of the owner's chains; for native tables, of all chains in them.
    pub chains: usize,
    /// Number of rules in chains of others that jump to the owner's chains.
    pub jumps: usize,
}

impl Saved {
    /// Reads the rules of `owners` from the kernel, in the network namespace of this thread, together with the rules of
    /// others in the tables of iptables.
    ///
    /// # Errors
    /// If rules cannot be read, or a line is not understood.
    pub fn of_kernel(owners: &[&Owner]) -> io::Result<Self> {
        let found = binaries::find(None)?;
        // The programs print one table after another, and rules may change between two tables.
        let mut last = Self::printed(&found, owners)?;
        for _ in 1..READS {
            let now = Self::printed(&found, owners)?;
            if now.has_the_same_rules(&last) {
                return Ok(now);
            }
            last = now;
        }
        Err(io::Error::other(format!(
            "the rules are others each time they are read ({READS} times): stop the program that writes them first"
        )))
    }

    /// Returns true if both have equal rules. Ignores counters and the elements of sets with a timeout.
    pub fn has_the_same_rules(&self, other: &Self) -> bool {
        let rules = |saved: &Self| -> Vec<(String, String)> {
            let texts = saved.texts.iter();
            texts
                .map(|text| (text.origin.clone(), rules(&text.text)))
                .collect()
        };
        rules(self) == rules(other)
    }

    /// Returns true if the kernel has rules of the owners that are not among the saved ones: the owners wrote rules
    /// since.
    ///
    /// # Errors
    /// If rules cannot be read, or a line is not understood.
    pub fn were_written_since(&self, owners: &[&Owner]) -> io::Result<bool> {
        for now in Self::of_kernel(owners)?.texts {
            let is_same = |saved: &&Printed| match now.form {
                Form::Nft => rules(&saved.text) == rules(&now.text),
                Form::Saved => saved.origin == now.origin,
            };
            let Some(saved) = self.texts.iter().find(is_same) else {
                return Ok(true);
            };
            if now.form == Form::Saved {
                // The plan has the rules that the kernel has and the saved text lacks.
                let more = restore::plan(&now.as_text(), &saved.as_text(), owners);
                if more? != restore::Restoration::default() {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Returns the rules that others wrote into their own chains and that are removed together with the owners' chains.
    ///
    /// # Errors
    /// If a line is not understood.
    pub fn of_others(&self, owners: &[&Owner]) -> io::Result<Vec<String>> {
        let mut all = Vec::new();
        for text in self.texts.iter().filter(|text| text.form == Form::Saved) {
            let removal = cleanup::plan(&text.as_text(), owners)?;
            all.extend(removal.of_others);
        }
        Ok(all)
    }

    fn printed(found: &Binaries, owners: &[&Owner]) -> io::Result<Self> {
        let mut saved = Self::default();
        for printed in printed(found, owners)? {
            if printed.form == Form::Nft || count(&printed, owners)?.chains > 0 {
                saved.texts.push(printed);
            }
        }
        Ok(saved)
    }

    /// Returns the texts for reading.
    pub fn as_texts(&self) -> Vec<Text<'_>> {
        self.texts.iter().map(Printed::as_text).collect()
    }

    /// Returns true if the owners have no rules.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Counts chains and rules, once for each program that printed any.
    ///
    /// # Errors
    /// If a line is not understood.
    pub fn counts(&self, owners: &[&Owner]) -> io::Result<Vec<Count>> {
        self.texts.iter().map(|text| count(text, owners)).collect()
    }

    /// Returns true if both the tables of iptables and native tables of nf_tables have rules.
    pub fn is_mixed(&self) -> bool {
        let first = self.texts.first().map(|text| text.form);
        self.texts.iter().any(|text| Some(text.form) != first)
    }

    /// Writes the rules to a file in one step and syncs it to the disk. Returns the file's SHA-256.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<String> {
        let text = self.to_text();
        disk::replace(path, &text)?;
        Ok(sha256(&text))
    }

    fn to_text(&self) -> String {
        let mut all = String::new();
        for printed in &self.texts {
            // Writing to a String cannot fail.
            let _ = writeln!(all, "{SECTION}{}", printed.origin);
            all += printed.text.trim_end();
            all.push('\n');
        }
        all += END;
        all
    }

    /// Reads the rules that a take-over saved.
    ///
    /// # Errors
    /// If the file cannot be read, or differs from the file that the take-over wrote.
    pub fn of(journal: &Journal) -> io::Result<Self> {
        Ok(Self::read(&journal.file, Some(&journal.sha256))?.0)
    }

    /// Reads a file that [`Saved::write`] wrote, and returns its SHA-256. If `wanted` has a checksum, the file must
    /// match it.
    ///
    /// # Errors
    /// If the file cannot be read, has another checksum, or has another format.
    pub fn read(path: &Path, wanted: Option<&str>) -> io::Result<(Self, String)> {
        let error = |why: String| io::Error::other(format!("{}: {why}", path.display()));
        let text = fs::read_to_string(path).map_err(|why| error(why.to_string()))?;
        let has = sha256(&text);
        if let Some(wanted) = wanted.filter(|wanted| *wanted != has) {
            return Err(error(format!(
                "the SHA-256 is {has}, and was {wanted} when the rules were saved: the file was changed; --revert FILE brings it back as it is now"
            )));
        }
        Ok((Self::of_text(&text).map_err(error)?, has))
    }

    fn of_text(text: &str) -> Result<Self, String> {
        let Some(text) = text.strip_suffix(END) else {
            return Err(
                "was not written by `dataplane-migrate takeover`, or its end is missing".to_owned(),
            );
        };
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
                    "was not written by `dataplane-migrate takeover`: it begins with {}",
                    line.trim_end()
                ));
            }
        }
        if saved.is_empty() {
            return Err("has no rules".to_owned());
        }
        Ok(saved)
    }

    /// Restores the missing rules to the kernel's present rules. A dry run returns the steps without running them.
    ///
    /// # Errors
    /// If rules cannot be read, a program is missing or fails, or rules are still missing afterwards.
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

    /// Plans the changes that restore the missing rules.
    fn missing(&self, found: &Binaries, owners: &[&Owner]) -> io::Result<cleanup::Found> {
        let now = printed(found, owners)?;
        let (mut steps, mut lost) = (Vec::new(), Vec::new());
        for text in &self.texts {
            if text.form == Form::Nft {
                steps.extend(listed(text, found, &now)?);
                continue;
            }
            let there = now.iter().find(|now| now.origin == text.origin);
            let there = Printed {
                text: there.map(|now| now.text.clone()).unwrap_or_default(),
                ..text.clone()
            };
            let back = restore::plan(&text.as_text(), &there.as_text(), owners)?;
            lost.extend(back.lost);
            if back.input.is_empty() {
                continue;
            }
            let (jumps, chains) = (back.jumps, back.chains);
            steps.push(by_restore(found, &text.origin, back.input, jumps, chains)?);
        }
        Ok((steps, lost))
    }
}

/// Prints all tables of iptables that have rules, as one text for each program, and the owners' native tables of
/// nf_tables.
fn printed(found: &Binaries, owners: &[&Owner]) -> io::Result<Vec<Printed>> {
    let mut tables = netfilter::tables().map_err(io::Error::other)?;
    tables.retain(|table| table.kind != Kind::Native || is_of(table, owners));
    collect::collect(None, found, &tables, collect::Native::Print)?.whole()
}

/// The result of a restoration, or of its dry run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Back {
    /// The changes.
    pub steps: Vec<Step>,
    /// Rules that cannot be restored, each with the reason.
    pub lost: Vec<String>,
}

/// Returns the change that restores a table printed by `nft`. Returns `None` if the kernel has an equal table.
fn listed(text: &Printed, found: &Binaries, now: &[Printed]) -> io::Result<Option<(Step, By)>> {
    let (saved, _) = ruleset::read(&[text.as_text()]);
    let [table] = &saved[..] else {
        return Err(io::Error::other("a text of nft has other than one table"));
    };
    if now
        .iter()
        .any(|now| now.form == Form::Nft && rules(&now.text) == rules(&text.text))
    {
        return Ok(None);
    }
    let Some(nft) = &found.nft else {
        return Err(io::Error::other(format!(
            "no nft is here: {}",
            super::detect::GET_NFT
        )));
    };
    let name = &table.name;
    // One transaction replaces the whole table, even if the kernel has a part of it.
    let input = format!("add table {name}\ndelete table {name}\n{}", text.text);
    let step = Step {
        command: "nft -f -".to_owned(),
        input,
        jumps: 0,
        chains: table.chains.len(),
    };
    Ok(Some((step, By::Nft(nft.path.clone()))))
}

/// Returns the text without its variable parts: comments, counters, and the elements of sets with a timeout.
pub fn rules(text: &str) -> String {
    let mut all = String::new();
    let (mut forgets, mut in_elements) = (false, false);
    for line in text.lines().map(str::trim) {
        if line.ends_with('{') && !line.starts_with("elements") {
            forgets = false;
        }
        forgets |=
            line.starts_with("timeout ") || line.starts_with("flags ") && line.contains("timeout");
        in_elements |= forgets && line.starts_with("elements = {");
        if in_elements {
            in_elements = !line.ends_with('}');
            continue;
        }
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let line = if line.starts_with(':') {
            line.split(" [").next().unwrap_or(line)
        } else {
            line
        };
        let is_nft = !line.starts_with('-');
        let (mut words, mut last) = (line.split(' '), "");
        while let Some(word) = words.next() {
            // In nft: `counter packets 7 bytes 420`.
            if is_nft && last == "counter" && matches!(word, "packets" | "bytes") {
                words.next();
                continue;
            }
            all += word;
            all.push(' ');
            last = word;
        }
        all.push('\n');
    }
    all
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
    let removal = cleanup::plan(&printed.as_text(), owners)?;
    Ok(Count {
        origin,
        chains: removal.chains,
        jumps: removal.jumps,
    })
}

fn sha256(text: &str) -> String {
    format!("{:x}", Sha256::digest(text.as_bytes()))
}

/// Returns the name of a new file for saved rules, and the present time. Does not reuse a name, because the file of an
/// earlier take-over may still be needed.
pub fn new_file(directory: &Path) -> (PathBuf, String) {
    let now = jiff::Timestamp::now();
    let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let name = format!("rules-{}", now.replace(':', ""));
    let names = (2..).map(|number| format!("{name}-{number}"));
    let mut paths = [name.clone()]
        .into_iter()
        .chain(names)
        .map(|name| directory.join(name));
    let path = paths.find(|path| !path.exists());
    (path.unwrap_or_else(|| directory.join(name)), now)
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
        assert_eq!(
            Saved::read(&path, Some(&sum)).unwrap(),
            (saved, sum.clone())
        );
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("OUTPUT", "INPUT")).unwrap();
        let why = Saved::read(&path, Some(&sum)).unwrap_err().to_string();
        assert!(why.contains("was changed"), "{why}");
        for other in ["", "*nat\nCOMMIT\n", text.trim_end_matches(END)] {
            fs::write(&path, other).unwrap();
            assert!(Saved::read(&path, None).is_err(), "{other}");
        }
    }

    #[test]
    fn no_file_of_an_earlier_take_over_is_written_over() {
        let directory = tempfile::tempdir().unwrap();
        let mut names = std::collections::BTreeSet::new();
        for _ in 0..3 {
            let (path, _) = new_file(directory.path());
            fs::write(&path, "").unwrap();
            assert!(names.insert(path));
        }
    }

    #[test]
    fn counters_and_what_sets_forget_make_no_difference() {
        let table = |counter: u32, element: &str, to: &str| {
            format!(
                "table ip kube-proxy {{\n\tset affinity {{\n\t\ttype ipv4_addr\n\t\tflags dynamic,timeout\n\t\ttimeout 3h\n\
                 \t\telements = {{ {element} }}\n\t}}\n\tmap services {{\n\t\ttype ipv4_addr : verdict\n\
                 \t\telements = {{ 10.96.0.10 : goto {to} }}\n\t}}\n\tchain web {{\n\
                 \t\tcounter packets {counter} bytes 7 accept\n\t}}\n}}\n"
            )
        };
        let first = rules(&table(
            1,
            "10.0.0.1 expires 2h59m,\n 10.0.0.2 expires 5s",
            "web",
        ));
        assert_eq!(first, rules(&table(2, "10.0.0.3 expires 1s", "web")));
        assert_ne!(first, rules(&table(1, "10.0.0.1 expires 2h59m", "other")));
        assert_ne!(rules("quota 5 bytes return"), rules("quota 5 bytes drop"));
        let saved = |counters: &str, rule: &str| {
            rules(&format!(
                "# at 7\n*nat\n:OUTPUT ACCEPT {counters}\n{rule}\nCOMMIT\n"
            ))
        };
        assert_eq!(
            saved("[0:0]", "-A OUTPUT -j X"),
            saved("[7:420]", "-A OUTPUT -j X")
        );
        assert_ne!(
            saved("[0:0]", "-A OUTPUT -j X"),
            saved("[0:0]", "-A OUTPUT -j Y")
        );
    }
}

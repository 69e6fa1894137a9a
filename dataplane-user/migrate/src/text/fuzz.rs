//! Checks the readers with any text: reading ends, the time grows with the text's length, and a printed result reads
//! back unchanged.

use std::{fmt, fs, path::PathBuf, time::Duration};

use proptest::prelude::*;

use super::{
    Entry, Words,
    chance::{self, Change, changed, shortest},
    entries, nft, tree,
    words::Word,
};

/// Rules that kube-proxy 1.36 wrote, and further rules as istio-iptables and others write them.
fn examples() -> [String; 2] {
    let saved = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data/kube-proxy-1.36/iptables-save.txt");
    let others = "*mangle\n-N ISTIO_DIVERT\n-I PREROUTING 1 -i eth1 ! -d ::1/128 -m mark ! --mark 0x539/0xfff \
        -j ISTIO_DIVERT\n[0:0] -A ISTIO_DIVERT -j MARK --set-xmark 0x539/0xffffffff\nCOMMIT\n*filter\n\
        :cali-FORWARD - [0:0]\n:FORWARD DROP [12:34]\n\
        -A cali-FORWARD -m comment --comment \"cali:_-9\\\"x\\\\ y\" -m set --match-set cali40s:x src -j DROP\nCOMMIT\n";
    [fs::read_to_string(saved).unwrap(), others.to_owned()]
}

impl fmt::Display for Entry<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(name) => write!(f, "*{name}"),
            Self::Chain { name, policy, .. } => {
                write!(f, ":{name} {}", policy.unwrap_or("-"))
            }
            Self::Rule(rule) => rule.fmt(f),
            Self::Commit => f.write_str("COMMIT"),
        }
    }
}

/// Returns an entry without its line's number.
fn unnumbered(entry: Entry<'_>) -> Entry<'_> {
    match entry {
        Entry::Rule(mut rule) => {
            rule.line = 0;
            Entry::Rule(rule)
        }
        Entry::Chain { name, policy, .. } => Entry::Chain {
            line: 0,
            name,
            policy,
        },
        other => other,
    }
}

/// Reads the parts of a rule, and checks that they contain all words in their order.
fn read_parts(rule: &str) {
    let mut words = Words::new(rule).filter_map(Result::ok).peekable();
    let is_value = |word: &Word<'_>| !word.is("!") && !word.is_option();
    for part in tree::saved(rule) {
        let first = part.not.then_some("!").into_iter();
        for word in first.chain(Some(part.name).filter(|name| !name.is_empty())) {
            assert_eq!(words.next().map(|word| word.raw), Some(word), "{rule}");
        }
        let value = words.next_if(is_value).map(|word| {
            let text = word.text();
            assert!(text.len() <= word.raw.len(), "{rule}");
            text
        });
        assert_eq!(value.unwrap_or_default(), part.value, "{rule}");
        let more = words.next_if(is_value).map(|word| word.raw);
        assert_eq!(more, part.more, "{rule}");
        while words.next_if(is_value).is_some() {}
    }
    assert_eq!(words.next(), None, "{rule}");
}

/// Reads `text`, prints the result, and reads the printed text.
fn read(text: &str) {
    let lines = text.lines().count();
    let mut read = Vec::new();
    for entry in entries(text) {
        match entry {
            Err(error) => assert!(
                (1..=lines).contains(&error.line),
                "{error}: of {lines} lines"
            ),
            Ok(entry) => {
                if let Entry::Rule(rule) = entry {
                    assert!((1..=lines).contains(&rule.line));
                    read_parts(rule.text);
                }
                read.push(unnumbered(entry));
            }
        }
    }
    let printed: Vec<String> = read.iter().map(Entry::to_string).collect();
    let printed = printed.join("\n");
    let again: Vec<Entry<'_>> = entries(&printed)
        .filter_map(Result::ok)
        .map(unnumbered)
        .collect();
    assert_eq!(again, read, "{text}\n{printed}");
}

/// Reads a listing of nft, and checks that its entries cover the text in order.
fn read_listing(text: &str) {
    let lines = text.lines().count();
    let mut last = 0;
    for entry in nft::entries(text) {
        let (line, part) = match entry {
            Err(error) => (error.line, error.text),
            Ok(nft::Entry::Base { line, text, .. } | nft::Entry::Rule { line, text, .. }) => {
                (line, text)
            }
            Ok(nft::Entry::Elements { text, .. }) => (last, text),
            Ok(nft::Entry::Table { name, .. } | nft::Entry::Chain { name }) => (last, name),
        };
        assert!(
            (last..=lines.max(1)).contains(&line),
            "{line} after {last} of {lines}: {text}"
        );
        last = line;
        let parts = tree::listed(part).parts;
        assert!(parts.iter().all(|part| part.value.len() <= 2 * text.len()));
        let words: usize = nft::words(part).map(str::len).sum();
        assert!(words <= part.len() && part.len() <= text.len());
    }
}

fn change() -> impl Strategy<Value = Change> {
    chance::change(&[
        "\n",
        "\r\n",
        "\t",
        " ",
        "\"",
        "\\",
        "!",
        " ! ",
        "-",
        "--",
        "*",
        "* ",
        ":",
        "[",
        "]",
        "[1:2]",
        "-A ",
        "-I ",
        "-I X 7 ",
        "-N ",
        "COMMIT",
        "COMMIT\n",
        "#",
        "\u{b}",
        "\u{85}",
        "\u{2003}",
        "\0",
        "18446744073709551616",
        "é",
    ])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: chance::runs(200), ..ProptestConfig::default() })]

    #[test]
    fn any_text_of_rules(text in "[*:\\[\\]\"\\\\!#\\-AINXCOMT0-9 \t\n\u{b}]{0,200}") {
        read(&text);
        read(&format!("*nat\n{text}\nCOMMIT"));
    }

    #[test]
    fn any_listing(text in "[{}\";,# \t\na-c@:0-9]{0,200}") {
        read_listing(&text);
        read_listing(&format!("table ip a {{\n{text}\n}}\n"));
        read_listing(&format!("table ip a {{\n\tchain b {{\n{text}\n}}\n}}\n"));
    }

    #[test]
    fn changed_listings(changes in prop::collection::vec(change(), 1..6)) {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/kube-proxy-1.36/nft-ruleset.txt");
        read_listing(&changed(fs::read(path).unwrap(), changes));
    }

    #[test]
    fn changed_rules(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec(change(), 1..6),
    ) {
        read(&changed(which.get(&examples()).clone().into_bytes(), changes));
    }
}

#[test]
fn examples_read_as_they_print() {
    for text in examples() {
        assert_eq!(entries(&text).find_map(Result::err), None);
        read(&text);
    }
}

/// Compares the time with the time for splitting the text at white space.
#[test]
fn reading_takes_time_by_the_length() {
    let rule = "-A KUBE-SVC-A ! -s 10.244.0.0/16 -d 10.96.0.1/32 -p tcp -m comment --comment \"ns/web:p cluster IP\" -m tcp \
        --dport 80 -j KUBE-MARK-MASQ\n";
    let options = |text: &str| {
        let rules = entries(text).filter_map(|entry| match entry {
            Ok(Entry::Rule(rule)) => Some(rule.parts().count()),
            _ => None,
        });
        rules.sum()
    };
    for (what, text) in [
        (
            "many rules",
            format!("*nat\n{}COMMIT\n", rule.repeat(100_000)),
        ),
        (
            "a long line",
            format!("*nat\n-A X {}\nCOMMIT\n", "\"a\" ! ".repeat(200_000)),
        ),
        (
            "a long quote",
            format!("*nat\n-A X \"{}\nCOMMIT\n", "\\\"".repeat(200_000)),
        ),
        (
            "many errors",
            format!("*nat\n{}COMMIT\n", "-A\n".repeat(200_000)),
        ),
    ] {
        let split = shortest(|| text.split_ascii_whitespace().count());
        let read = shortest(|| options(&text));
        let bytes = Duration::from_nanos(text.len() as u64);
        assert!(
            read < (split + bytes) * 30,
            "{what}: {read:?}; splitting takes {split:?}"
        );
        eprintln!(
            "{what}: {} bytes in {read:?}, split in {split:?}",
            text.len()
        );
    }
}

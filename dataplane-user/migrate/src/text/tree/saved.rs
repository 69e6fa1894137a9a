//! Splits a rule of `iptables-save` into its options.

use super::{
    super::words::{Word, Words},
    Key, Part,
};

/// Returns the parts of a rule.
pub fn saved(rule: &str) -> impl Iterator<Item = Part<'_>> {
    let mut words = Words::new(rule).filter_map(Result::ok).peekable();
    let mut module = "";
    std::iter::from_fn(move || {
        words.peek()?;
        let not = words.next_if(|word| word.is("!")).is_some();
        let name = words.next_if(Word::is_option);
        let name = name.map_or("", |word| word.raw);
        let mut value = || words.next_if(|word| !word.is("!") && !word.is_option());
        let first = value();
        let more = value().map(|word| word.raw);
        while value().is_some() {}
        let value = first.map(|word| word.text()).unwrap_or_default();
        let key = match name {
            "-s" | "--source" => Key::Source,
            "-d" | "--destination" => Key::Destination,
            "-i" | "--in-interface" => Key::In,
            "-o" | "--out-interface" => Key::Out,
            "-p" | "--protocol" => Key::Protocol,
            "--sport" | "--sports" | "--source-port" | "--source-ports" => Key::SourcePort,
            "--dport" | "--dports" | "--destination-port" | "--destination-ports" => Key::Port,
            "--uid-owner" => Key::Uid,
            "--gid-owner" => Key::Gid,
            "--mark" if module == "connmark" => Key::ConnMark,
            "--mark" => Key::Mark,
            "--ctstate" => Key::State,
            "--comment" => Key::Comment,
            "--match-set" => Key::Set,
            "-j" | "--jump" => Key::Target,
            "-g" | "--goto" => Key::Chain,
            "--to-ports" | "--to-port" | "--on-port" => Key::ToPort,
            "--set-mark" | "--set-xmark" | "--or-mark" | "--tproxy-mark" => Key::SetMark,
            "-m" | "--match" => {
                module = first.map_or("", |word| word.raw);
                Key::Module
            }
            _ => Key::Other,
        };
        Some(Part {
            key,
            not,
            name,
            value,
            more,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_iptables_are_read_by_their_parts() {
        let rule = r#"! -s 10.0.0.0/8 -m comment --comment "a \"b\" c" -m connmark --mark 0x1/0xf --what 1 2 3 ! x -g Y"#;
        let parts: Vec<Part<'_>> = saved(rule).collect();
        let found = parts.iter().map(|part| {
            let Part {
                key,
                not,
                name,
                value,
                more,
            } = part;
            (*key, *not, *name, &**value, *more)
        });
        let wanted = [
            (Key::Source, true, "-s", "10.0.0.0/8", None),
            (Key::Module, false, "-m", "comment", None),
            (Key::Comment, false, "--comment", "a \"b\" c", None),
            (Key::Module, false, "-m", "connmark", None),
            (Key::ConnMark, false, "--mark", "0x1/0xf", None),
            (Key::Other, false, "--what", "1", Some("2")),
            (Key::Other, true, "", "x", None),
            (Key::Chain, false, "-g", "Y", None),
        ];
        assert_eq!(found.collect::<Vec<_>>(), wanted);
        let plain: Vec<bool> = parts.iter().map(|part| part.plain().is_some()).collect();
        assert_eq!(plain.iter().filter(|plain| !**plain).count(), 1);
    }
}

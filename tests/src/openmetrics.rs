//! A strict reader of the OpenMetrics text format 1.0, which refuses invalid text like a server.
//!
//! It refuses text that Prometheus refuses or misreads: duplicate series, families that are not in one piece, samples
//! of no family, names of the wrong form, and histograms that do not add up.
//!
//! <https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md>

use std::{
    collections::{BTreeMap, BTreeSet},
    iter::Peekable,
    str::Chars,
};

/// Labels by their names.
pub type Labels = BTreeMap<String, String>;

/// A value of a series.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The name, suffix included.
    pub name: String,
    /// Its labels.
    pub labels: Labels,
    /// Its value.
    pub value: f64,
}

/// A family that has begun.
struct Family {
    name: String,
    kind: String,
    has_help: bool,
}

/// Reads a whole exposition.
///
/// # Errors
/// The reason, and the line.
pub fn parse(text: &str) -> Result<Vec<Sample>, String> {
    let Some(body) = text.strip_suffix("# EOF\n") else {
        return Err("it does not end with `# EOF`".into());
    };
    let mut reader = Reader::default();
    for (number, line) in body.split_terminator('\n').enumerate() {
        reader
            .line(line)
            .map_err(|error| format!("line {}: {error}: {line}", number + 1))?;
    }
    reader.check_histograms()?;
    Ok(reader.samples)
}

#[derive(Default)]
struct Reader {
    samples: Vec<Sample>,
    series: BTreeSet<(String, Labels)>,
    families: BTreeSet<String>,
    family: Option<Family>,
    histograms: BTreeSet<String>,
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<(), String> {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, _) = rest.split_once(' ').ok_or("a HELP without text")?;
            let family = self.begin(name)?;
            if std::mem::replace(&mut family.has_help, true) {
                return Err("a second HELP".into());
            }
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or("a TYPE without type")?;
            if suffixes(kind).is_none() {
                return Err(format!("{kind:?} is no type"));
            }
            let family = self.begin(name)?;
            if !family.kind.is_empty() {
                return Err("a second TYPE".into());
            }
            kind.clone_into(&mut family.kind);
            if kind == "histogram" {
                self.histograms.insert(name.to_owned());
            }
        } else if line.starts_with('#') {
            return Err("neither HELP nor TYPE".into());
        } else {
            let sample = sample(line)?;
            self.belongs(&sample)?;
            if !self
                .series
                .insert((sample.name.clone(), sample.labels.clone()))
            {
                return Err("the series is there twice".into());
            }
            self.samples.push(sample);
        }
        Ok(())
    }

    /// Returns the family of this name: the current one or a new one.
    fn begin(&mut self, name: &str) -> Result<&mut Family, String> {
        if !is_name(name, true) {
            return Err(format!("{name:?} is no name"));
        }
        if self
            .family
            .as_ref()
            .is_none_or(|family| family.name != name)
        {
            if !self.families.insert(name.to_owned()) {
                return Err("the family is there twice".into());
            }
            self.family = Some(Family {
                name: name.to_owned(),
                kind: String::new(),
                has_help: false,
            });
        } else if self
            .samples
            .last()
            .is_some_and(|s| s.name.starts_with(name))
        {
            return Err("it comes after the family's samples".into());
        }
        self.family.as_mut().ok_or_else(|| "no family".into())
    }

    fn belongs(&self, sample: &Sample) -> Result<(), String> {
        let family = self.family.as_ref().ok_or("a sample of no family")?;
        let suffix = sample.name.strip_prefix(&family.name);
        let allowed = suffixes(&family.kind).ok_or("a family without a type")?;
        if !suffix.is_some_and(|suffix| allowed.contains(&suffix)) {
            return Err(format!("no sample of the {} {}", family.kind, family.name));
        }
        let counts =
            family.kind == "counter" || family.kind == "histogram" && suffix != Some("_sum");
        if counts && !(sample.value.is_finite() && sample.value >= 0.0) {
            return Err("no count".into());
        }
        Ok(())
    }

    /// Buckets go up, the last is `+Inf`, and there are as many as are counted.
    fn check_histograms(&self) -> Result<(), String> {
        for name in &self.histograms {
            let mut counts: BTreeMap<Labels, f64> = BTreeMap::new();
            let mut buckets: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
            for sample in &self.samples {
                match sample.name.strip_prefix(name.as_str()) {
                    Some("_count") => {
                        counts.insert(sample.labels.clone(), sample.value);
                    }
                    Some("_bucket") => {
                        let mut labels = sample.labels.clone();
                        let le = labels.remove("le").ok_or("a bucket without `le`")?;
                        let le = number(&le)?;
                        buckets.entry(labels).or_default().push((le, sample.value));
                    }
                    _ => {}
                }
            }
            for (labels, buckets) in buckets {
                let goes_up = |pair: &[(f64, f64)]| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1;
                let last = buckets.last().copied();
                let whole = last.is_some_and(|(le, count)| {
                    le.is_infinite() && counts.get(&labels) == Some(&count)
                });
                if !whole || !buckets.windows(2).all(goes_up) {
                    return Err(format!("the histogram {name} does not add up: {labels:?}"));
                }
            }
        }
        Ok(())
    }
}

/// The suffixes of sample names by type.
fn suffixes(kind: &str) -> Option<&'static [&'static str]> {
    Some(match kind {
        "counter" => &["_total", "_created"],
        "gauge" | "unknown" => &[""],
        "histogram" => &["_bucket", "_count", "_sum", "_created"],
        "info" => &["_info"],
        _ => return None,
    })
}

/// `name{label="value",…} number`.
fn sample(line: &str) -> Result<Sample, String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, rest) = line.split_at(end);
    if !is_name(name, true) {
        return Err(format!("{name:?} is no name"));
    }
    let mut rest = rest.chars().peekable();
    let mut found = Labels::new();
    if rest.next_if_eq(&'{').is_some() {
        labels(&mut rest, &mut found)?;
    }
    if rest.next() != Some(' ') {
        return Err("no space before the value".into());
    }
    let value: String = rest.collect();
    Ok(Sample {
        name: name.to_owned(),
        labels: found,
        value: number(&value)?,
    })
}

/// Reads the text after the opening brace, the closing one included.
fn labels(rest: &mut Peekable<Chars<'_>>, found: &mut Labels) -> Result<(), String> {
    while rest.next_if_eq(&'}').is_none() {
        if !found.is_empty() && rest.next() != Some(',') {
            return Err("no comma between labels".into());
        }
        let mut name = String::new();
        while let Some(c) = rest.next_if(|c| *c != '=') {
            name.push(c);
        }
        if !is_name(&name, false) {
            return Err(format!("{name:?} is no label's name"));
        }
        if rest.next() != Some('=') || rest.next() != Some('"') {
            return Err(format!("no value of {name}"));
        }
        let mut value = String::new();
        loop {
            match rest.next().ok_or("a value without an end")? {
                '"' => break,
                '\\' => value.push(match rest.next() {
                    Some('n') => '\n',
                    Some(c @ ('"' | '\\')) => c,
                    other => return Err(format!("an escape of {other:?}")),
                }),
                c => value.push(c),
            }
        }
        if found.insert(name.clone(), value).is_some() {
            return Err(format!("the label {name} is there twice"));
        }
    }
    Ok(())
}

fn is_name(name: &str, colons: bool) -> bool {
    let is_first = |c: char| c.is_ascii_alphabetic() || c == '_' || colons && c == ':';
    name.starts_with(is_first) && name.chars().all(|c| is_first(c) || c.is_ascii_digit())
}

fn number(text: &str) -> Result<f64, String> {
    let is_number = text
        .chars()
        .all(|c| c.is_ascii_digit() || matches!(c, '.' | 'e' | 'E' | '+' | '-'));
    match text {
        "+Inf" => Ok(f64::INFINITY),
        "-Inf" => Ok(f64::NEG_INFINITY),
        "NaN" => Ok(f64::NAN),
        _ if is_number => text.parse().map_err(|_| format!("{text:?} is no number")),
        _ => Err(format!("{text:?} is no number")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
# HELP web_requests Requests, with \\\"quotes\\\".
# TYPE web_requests counter
web_requests_total{code=\"200\",path=\"/a,b\\\"\"} 3
web_requests_total{code=\"404\",path=\"\"} 0
# HELP up Whether.
# TYPE up gauge
up 1
# HELP took Seconds.
# TYPE took histogram
took_sum 0.5
took_count 2
took_bucket{le=\"0.1\"} 1
took_bucket{le=\"+Inf\"} 2
# EOF
";

    #[test]
    fn reads_what_is_valid() {
        let samples = parse(GOOD).unwrap();
        assert_eq!(samples.len(), 7);
        assert_eq!(samples[0].name, "web_requests_total");
        assert_eq!(samples[0].labels["path"], "/a,b\"");
        assert!((samples[0].value - 3.0).abs() < f64::EPSILON);
    }

    #[test]
    fn refuses_what_a_server_would_not_take() {
        let wrong = |from: &str, to: &str, says: &str| {
            assert!(GOOD.contains(from), "{from}");
            let error = parse(&GOOD.replacen(from, to, 1)).unwrap_err();
            assert!(error.contains(says), "{error}");
        };
        wrong("404\",path=\"\"", "200\",path=\"/a,b\\\"\"", "twice");
        wrong("code=\"200\",path", "path=\"\",path", "twice");
        wrong("code=\"200\",path", "code=\"200\" path", "comma");
        wrong("# HELP up", "up 1\n# HELP up", "no sample of");
        wrong(
            "# HELP took Seconds.\n# TYPE took",
            "# HELP up A.\n# TYPE up",
            "after",
        );
        wrong(
            "# HELP took",
            "# HELP web_requests A.\n# HELP took",
            "family is there twice",
        );
        wrong("# TYPE up gauge\n", "", "without a type");
        wrong("# TYPE up gauge", "# TYPE up guage", "no type");
        wrong("up 1", "up one", "no number");
        wrong("} 3", "} -3", "no count");
        wrong("} 3", "} NaN", "no count");
        wrong("} 3", "}3", "no space");
        wrong(
            "web_requests_total{code=\"404",
            "web_requests{code=\"404",
            "no sample of",
        );
        wrong("took_count 2", "took_count 3", "does not add up");
        wrong("{le=\"0.1\"} 1", "{le=\"0.1\"} 9", "does not add up");
        wrong("took_bucket{le=\"+Inf\"} 2\n", "", "does not add up");
        wrong("# EOF\n", "", "EOF");
        wrong("/a,b\\\"", "/a,b\\x", "escape");
        wrong("{code=\"404", "{c-d=\"404", "no label's name");
    }
}

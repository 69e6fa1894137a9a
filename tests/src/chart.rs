//! Renders the Helm chart in `deploy/`, by an engine for Go's templates with the functions of Helm's that the chart
//! uses: for machines without Helm.

use std::{
    collections::HashMap,
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    path::{Path, PathBuf},
};

use gtmpl_ng::{FuncError, Template, Value as Go};
use serde_json::{Value, json};

/// Why the chart could not be rendered.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/helm/dataplane")
}

fn read(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()).into())
}

/// Renders the chart, with `values` laid over its own, and returns its YAML documents.
///
/// # Errors
/// If a template or a value makes no sense.
pub fn render(namespace: &str, values: &Value) -> Result<Vec<String>, Error> {
    render_for("v1.36.0", namespace, values)
}

/// As [`render`], for a version of Kubernetes.
///
/// # Errors
/// If the chart cannot be read, or a template not be rendered.
pub fn render_for(version: &str, namespace: &str, values: &Value) -> Result<Vec<String>, Error> {
    let directory = directory();
    let about: Value = serde_saphyr::from_str(&read(&directory.join("Chart.yaml"))?)?;
    let mut all: Value = serde_saphyr::from_str(&read(&directory.join("values.yaml"))?)?;
    lay_over(&mut all, values);
    let context = json!({
        "Values": all,
        "Release": { "Name": "dataplane", "Namespace": namespace },
        "Chart": { "AppVersion": about["appVersion"] },
        "Capabilities": { "KubeVersion": { "Version": version } },
    });
    let mut documents = Vec::new();
    for entry in fs::read_dir(directory.join("templates"))? {
        let path = entry?.path();
        let mut template = Template::default();
        for (name, function) in FUNCTIONS {
            template.add_func(name, *function);
        }
        let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        // This engine has no functions that are fields.
        let text = read(&path)?.replace(".Files.Get", "filesGet");
        template.parse(text).map_err(|error| wrong(&error))?;
        let text = template
            .render(&gtmpl_ng::Context::from(to_go(&context)))
            .map_err(|error| wrong(&error))?;
        if text.contains("<no value>") {
            return Err(wrong(&format!("a value is missing: {text}")).into());
        }
        if path
            .extension()
            .is_some_and(|extension| extension == "yaml")
        {
            documents.extend(text.split("\n---\n").map(str::to_owned));
        }
    }
    Ok(documents)
}

fn lay_over(below: &mut Value, above: &Value) {
    match (below, above) {
        (Value::Object(below), Value::Object(above)) => {
            for (key, value) in above {
                // As Helm has it: null takes a default away.
                if value.is_null() {
                    below.remove(key);
                    continue;
                }
                lay_over(below.entry(key).or_insert(Value::Null), value);
            }
        }
        (below, above) => *below = above.clone(),
    }
}

fn to_go(value: &Value) -> Go {
    match value {
        Value::Null => Go::Nil,
        Value::Bool(is) => Go::from(*is),
        Value::Number(number) => Go::from(number.as_i64().unwrap()),
        Value::String(text) => Go::from(text),
        Value::Array(items) => Go::Array(items.iter().map(to_go).collect()),
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(key, value)| (key.clone(), to_go(value)));
            Go::Map(fields.collect::<HashMap<_, _>>())
        }
    }
}

fn from_go(value: &Go) -> Value {
    match value {
        Go::Bool(is) => (*is).into(),
        Go::String(text) => text.clone().into(),
        Go::Number(number) => number.as_i64().into(),
        Go::Array(items) => items.iter().map(from_go).collect(),
        Go::Map(fields) | Go::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(key, value)| (key.clone(), from_go(value)));
            Value::Object(fields.collect())
        }
        _ => Value::Null,
    }
}

fn to_yaml(arguments: &[Go]) -> Result<Go, FuncError> {
    let text = serde_saphyr::to_string(&from_go(&arguments[0]))
        .map_err(|error| FuncError::Generic(error.to_string()))?;
    Ok(Go::from(text.trim_end()))
}

fn nindent(arguments: &[Go]) -> Result<Go, FuncError> {
    let [Go::Number(spaces), Go::String(text)] = arguments else {
        return Err(FuncError::Generic("nindent: a number and a text".into()));
    };
    let spaces = usize::try_from(spaces.as_i64().unwrap_or_default()).unwrap_or_default();
    let indent = format!("\n{}", " ".repeat(spaces));
    Ok(Go::from(format!("{indent}{}", text.replace('\n', &indent))))
}

/// Helm's functions. A function in a pipeline gets the result of the step before as its last argument.
const FUNCTIONS: &[(&str, gtmpl_ng::Func)] = &[
    ("toYaml", to_yaml),
    ("nindent", nindent),
    ("sha256sum", sha256sum),
    ("trunc", trunc),
    ("trimSuffix", trim_suffix),
    ("replace", replace),
    ("filesGet", files_get),
    ("semverCompare", semver_compare),
];

/// Not SHA-256, which nothing here has, but as long, and other for another text.
fn sha256sum(arguments: &[Go]) -> Result<Go, FuncError> {
    let mut hasher = DefaultHasher::new();
    text(arguments, 0)?.hash(&mut hasher);
    Ok(Go::from(format!("{:016x}", hasher.finish()).repeat(4)))
}

/// `>=MAJOR.MINOR-0`, which is all that the chart asks.
fn semver_compare(arguments: &[Go]) -> Result<Go, FuncError> {
    let (wanted, version) = (text(arguments, 0)?, text(arguments, 1)?);
    let parts = |version: &str| -> Option<Vec<u32>> {
        let parts = version.split('.').take(2);
        parts.map(|part| part.parse().ok()).collect()
    };
    let wanted = wanted
        .strip_prefix(">=")
        .and_then(|wanted| wanted.strip_suffix("-0"));
    let wanted = wanted.and_then(parts);
    let version = parts(version.trim_start_matches('v'));
    if wanted.is_none() || version.is_none() {
        return Err(FuncError::Generic("semverCompare: >=MAJOR.MINOR-0".into()));
    }
    Ok(Go::from(version >= wanted))
}

fn trunc(arguments: &[Go]) -> Result<Go, FuncError> {
    let Go::Number(length) = &arguments[0] else {
        return Err(FuncError::Generic("trunc: a number and a text".into()));
    };
    let length = usize::try_from(length.as_i64().unwrap_or_default()).unwrap_or_default();
    Ok(Go::from(
        text(arguments, 1)?.chars().take(length).collect::<String>(),
    ))
}

fn trim_suffix(arguments: &[Go]) -> Result<Go, FuncError> {
    let (suffix, text) = (text(arguments, 0)?, text(arguments, 1)?);
    Ok(Go::from(text.strip_suffix(suffix).unwrap_or(text)))
}

fn replace(arguments: &[Go]) -> Result<Go, FuncError> {
    let (old, new) = (text(arguments, 0)?, text(arguments, 1)?);
    Ok(Go::from(text(arguments, 2)?.replace(old, new)))
}

/// A file of the chart's.
fn files_get(arguments: &[Go]) -> Result<Go, FuncError> {
    let path = directory().join(text(arguments, 0)?);
    let content = fs::read_to_string(&path);
    Ok(Go::from(content.map_err(|error| {
        FuncError::Generic(format!("{}: {error}", path.display()))
    })?))
}

fn text(arguments: &[Go], number: usize) -> Result<&str, FuncError> {
    match arguments.get(number) {
        Some(Go::String(text)) => Ok(text),
        other => Err(FuncError::Generic(format!("{other:?} is no text"))),
    }
}

//! Checks that modules have no circles. Cargo refuses circles of crates. Inside of a crate, the modules of one folder,
//! each with its own folder, import from each other in one direction only. A module may use the definitions of its
//! parents.
//!
//! The test reads source as tokens: every path, also in macros. It leaves out code that only tests compile. A name that
//! a module re-exports leads to the module that defines it. The test does not follow globs, and names that `use` gives
//! to modules.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Modules by their paths, such as `["packet", "route"]`; the crate's root has an empty path.
type Crate = BTreeMap<Vec<String>, Module>;

#[derive(Default)]
struct Module {
    file: PathBuf,
    /// Names that the module re-exports, with their paths.
    exports: BTreeMap<String, Vec<String>>,
    /// The paths in the module, each with its line.
    paths: Vec<(Vec<String>, usize)>,
}

/// Reads the file of a module, and the files of the modules below it.
fn read(found: &mut Crate, at: &[String], file: &Path, text: &dyn Fn(&Path) -> Option<String>) {
    let source = text(file).unwrap_or_else(|| panic!("cannot read {}", file.display()));
    let tokens: TokenStream = source
        .parse()
        .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let mut module = Module {
        file: file.to_owned(),
        ..Module::default()
    };
    let mut below = Vec::new();
    scan(tokens, &mut module, &mut below);
    found.insert(at.to_vec(), module);
    let folder = file.parent().expect("a file is in a folder");
    for name in below {
        let files = [
            folder.join(format!("{name}.rs")),
            folder.join(&name).join("mod.rs"),
        ];
        if let Some(file) = files.iter().find(|file| text(file).is_some()) {
            read(found, &[at, &[name]].concat(), file, text);
        }
    }
}

/// Collects paths, re-exports and the names of modules with files.
fn scan(tokens: TokenStream, module: &mut Module, below: &mut Vec<String>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let text = |at: usize| tokens.get(at).map(ToString::to_string).unwrap_or_default();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Punct(mark) if mark.as_char() == '#' && is_for_tests(&text(at + 1)) => {
                let ends = |token: &TokenTree| match token {
                    TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
                    token => token.to_string() == ";",
                };
                let end = tokens[at + 2..].iter().position(ends);
                at += 2 + end.unwrap_or(tokens.len());
            }
            TokenTree::Ident(word) if word == "mod" && text(at + 2) == ";" => {
                below.push(text(at + 1));
            }
            TokenTree::Ident(word) if word == "use" => {
                let before = at.checked_sub(1).map(text).unwrap_or_default();
                let is_public = before == "pub" || before.starts_with('(');
                at = tree(&tokens, at + 1, &[], module, is_public);
            }
            TokenTree::Ident(word) => {
                let (mut path, line) = (vec![word.to_string()], word.span().start().line);
                while text(at + 1) + &text(at + 2) == "::"
                    && let Some(TokenTree::Ident(next)) = tokens.get(at + 3)
                {
                    path.push(next.to_string());
                    at += 3;
                }
                module.paths.push((path, line));
            }
            TokenTree::Group(group) => scan(group.stream(), module, below),
            _ => {}
        }
        at += 1;
    }
}

fn is_for_tests(attribute: &str) -> bool {
    let text: String = attribute.split_whitespace().collect();
    text == "[cfg(test)]" || text.starts_with("[cfg(all(test")
}

/// Reads a tree of imports. Returns the index after it.
fn tree(
    tokens: &[TokenTree],
    mut at: usize,
    prefix: &[String],
    module: &mut Module,
    is_public: bool,
) -> usize {
    let mut path = prefix.to_vec();
    while let Some(token) = tokens.get(at) {
        match token {
            TokenTree::Ident(word) if word == "as" => at += 1,
            TokenTree::Ident(word) => {
                path.push(word.to_string());
                let goes_on = (tokens.get(at + 1)).is_some_and(|next| next.to_string() == ":");
                if !goes_on {
                    if word == "self" && path.len() > 1 {
                        path.pop();
                    } else if is_public {
                        module.exports.insert(word.to_string(), path.clone());
                    }
                    let path = std::mem::replace(&mut path, prefix.to_vec());
                    module.paths.push((path, word.span().start().line));
                }
            }
            TokenTree::Group(group) => {
                let inside: Vec<TokenTree> = group.stream().into_iter().collect();
                tree(&inside, 0, &path, module, is_public);
                path = prefix.to_vec();
            }
            TokenTree::Punct(mark) if mark.as_char() == ';' => return at,
            _ => {}
        }
        at += 1;
    }
    at
}

/// Returns the module in which a path ends that stands in module `from`; `None` if the module is in another crate.
/// `depth` is the maximum number of re-exports to follow.
fn target(all: &Crate, from: &[String], path: &[String], depth: usize) -> Option<Vec<String>> {
    let (head, mut rest) = path.split_first()?;
    let mut at = from.to_vec();
    match head.as_str() {
        "crate" => at.clear(),
        "self" => {}
        "super" => _ = at.pop(),
        head => {
            at.push(head.to_owned());
            all.get(&at)?;
        }
    }
    while let Some((_, tail)) = rest.split_first().filter(|(head, _)| *head == "super") {
        at.pop();
        rest = tail;
    }
    while let Some((head, tail)) = rest.split_first() {
        let child = [&at[..], std::slice::from_ref(head)].concat();
        if !all.contains_key(&child) {
            let exported = all[&at].exports.get(head).filter(|_| depth > 0);
            let defined = exported.and_then(|path| target(all, &at, path, depth - 1));
            return defined.or(Some(at));
        }
        (at, rest) = (child, tail);
    }
    Some(at)
}

/// Returns the imports that close circles, one a line.
fn circles(all: &Crate) -> Vec<String> {
    // For each folder: which module imports from which, with an example.
    let mut folders: BTreeMap<&[String], BTreeMap<(&String, String), String>> = BTreeMap::new();
    for (from, module) in all {
        for (path, line) in &module.paths {
            let Some(to) = target(all, from, path, 32) else {
                continue;
            };
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            if common == from.len() || common == to.len() {
                continue;
            }
            let file = module.file.display();
            let example = format!("{file}:{line}: imports {}", path.join("::"));
            let arrow = (&from[common], to[common].clone());
            let folder = folders.entry(&from[..common]).or_default();
            folder.entry(arrow).or_insert(example);
        }
    }
    let mut wrong = Vec::new();
    for arrows in folders.into_values() {
        let leads_to = |from: &str, to: &String| {
            let mut seen = BTreeSet::from([from]);
            let mut open = vec![from];
            while let Some(at) = open.pop() {
                let next = arrows.keys().filter(|(from, _)| *from == at);
                open.extend(next.filter_map(|(_, to)| seen.insert(to).then_some(to.as_str())));
            }
            seen.contains(to.as_str())
        };
        let closing = arrows.iter().filter(|((from, to), _)| leads_to(to, from));
        wrong.extend(closing.map(|((from, to), example)| format!("{from} -> {to}: {example}")));
    }
    wrong
}

fn crate_at(root: &Path, text: &dyn Fn(&Path) -> Option<String>) -> Crate {
    let mut found = Crate::new();
    read(&mut found, &[], root, text);
    found
}

/// Packages that still have circles, each with the number of its imports in circles. A number may only become smaller.
const KNOTS: [(&str, usize); 6] = [
    ("benches", 4),
    ("dataplane-common", 2),
    ("dataplane-ebpf", 5),
    ("dataplane-user/kernel", 63),
    ("dataplane-user/source", 11),
    ("proof", 2),
];

#[test]
fn modules_import_in_one_direction() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let inside = |of: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(of).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let text = |file: &Path| fs::read_to_string(file).ok();
    let (mut wrong, mut crates) = (Vec::new(), 0);
    for package in [
        inside(&workspace),
        inside(&workspace.join("dataplane-user")),
    ]
    .concat()
    {
        let mut roots = ["src/lib.rs", "src/main.rs"]
            .map(|file| package.join(file))
            .to_vec();
        for test in inside(&package.join("tests")) {
            roots.extend([test.join("main.rs"), test]);
        }
        roots.retain(|root| root.is_file() && root.extension().is_some_and(|of| of == "rs"));
        crates += roots.len();
        let circles = roots
            .iter()
            .flat_map(|root| circles(&crate_at(root, &text)));
        let found: Vec<String> = circles.collect();
        let known = KNOTS
            .iter()
            .find(|(known, _)| package == workspace.join(known));
        let known = known.map_or(0, |(_, count)| *count);
        if found.len() != known {
            let (package, count) = (package.display(), found.len());
            wrong.push(format!(
                "{package}: {count} imports in circles; KNOTS has {known}"
            ));
            wrong.extend(found);
        }
    }
    assert!(crates > 20, "{crates} crates");
    assert!(
        wrong.is_empty(),
        "move what both modules of a circle need to a third one:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn circles_are_found() {
    let found = |files: [(&str, &str); 4]| {
        let text = |path: &Path| {
            let file = files.iter().find(|file| Path::new(file.0) == path)?;
            Some(file.1.to_owned())
        };
        circles(&crate_at(Path::new("src/lib.rs"), &text)).len()
    };
    let lib = ("src/lib.rs", "mod a; mod b;");
    let a = ("src/a/mod.rs", "mod c; pub use c::C; pub struct A;");
    let c = ("src/a/c.rs", "pub struct C(crate::b::B);");
    let b = |text| ("src/b.rs", text);
    assert_eq!(found([lib, a, c, b("use crate::{a::A};")]), 2);
    let in_a_macro = "fn f() { println!(\"{}\", super::a::f()) }";
    assert_eq!(found([lib, a, c, b(in_a_macro)]), 2);
    let in_tests = "#[cfg(test)] mod tests { use crate::a::A; } struct B;";
    assert_eq!(found([lib, a, c, b(in_tests)]), 0);
    let of_a_parent = ("src/a/c.rs", "use super::A; pub struct C;");
    assert_eq!(found([lib, a, of_a_parent, b("use crate::a::C;")]), 0);
    // A module imports its own name through another module that re-exports it.
    let own = ("src/b.rs", "pub use crate::a::C as Known;");
    let by = ("src/a/c.rs", "pub struct C(crate::b::Known);");
    assert_eq!(found([lib, a, by, own]), 2);
}

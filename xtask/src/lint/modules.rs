//! The modules of a crate, and which file imports what from which other one.
//!
//! Reads source as text: `use` and every other path, also in macros, followed through re-exports to the file that
//! defines the item. A `use` of a module as such imports nothing: the paths that then begin with the module's name do.
//! Neither does a re-export of what a module's own children define. What only tests compile (`#[cfg(test)]`) is left
//! out. A path that begins with a type or another crate leads nowhere here.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

use super::tokens::{Token, tokens};

/// How many re-exports are followed for one import.
const DEPTH: usize = 32;

/// A crate's modules; the first is its root.
#[derive(Debug, Default)]
pub struct Crate {
    modules: Vec<Module>,
    files: Vec<PathBuf>,
}

#[derive(Debug)]
struct Module {
    file: usize,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    /// Names that `use` brings in, with their paths.
    names: BTreeMap<String, Vec<String>>,
    /// Paths of which `use` brings in everything.
    globs: Vec<Vec<String>>,
    /// Names of items.
    defined: BTreeSet<String>,
    paths: Vec<Mention>,
}

/// A path in a module.
#[derive(Debug)]
struct Mention {
    path: Vec<String>,
    line: usize,
    kind: Kind,
}

/// How a path is mentioned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// By `use`.
    Import,
    /// By `pub use`.
    ReExport,
    /// Otherwise: something of it is used.
    Use,
}

/// Where a path leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Target {
    /// The module that has the item.
    module: usize,
    /// Whether the path is the module's own.
    is_module: bool,
}

/// An import by one file from another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrow {
    /// The file that imports: an index into [`Crate::files`].
    pub from: usize,
    /// The file that has the item.
    pub to: usize,
    /// The line of the import.
    pub line: usize,
    /// What is imported, as it is written.
    pub import: String,
}

impl Crate {
    /// Reads a crate from its root file. `read` returns the contents of a file, or `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// A module without a file, and source that ends early.
    pub fn read(root: &Path, read: &impl Fn(&Path) -> Option<String>) -> Result<Self> {
        let mut found = Self::default();
        let dir = root.parent().unwrap_or(Path::new("")).to_owned();
        found.add_file(root, &dir, None, "", read)?;
        Ok(found)
    }

    /// The files, as they were asked for.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Whether the first file's module contains the second file's.
    pub fn contains(&self, outer: usize, inner: usize) -> bool {
        let mut module = self.module_of(inner);
        while let Some(parent) = module.parent {
            module = &self.modules[parent];
            if module.file == outer && outer != inner {
                return true;
            }
        }
        false
    }

    fn module_of(&self, file: usize) -> &Module {
        let found = self.modules.iter().find(|of| of.file == file);
        found.expect("every file is a module")
    }

    /// All imports from one file to another, sorted.
    pub fn arrows(&self) -> Vec<Arrow> {
        let mut found = BTreeSet::new();
        for (index, module) in self.modules.iter().enumerate() {
            for Mention { path, line, kind } in &module.paths {
                let Some(target) = self.resolve(index, path, DEPTH) else {
                    continue;
                };
                let to = self.modules[target.module].file;
                let is_module = target.is_module && *kind != Kind::Use;
                let hands_on = *kind == Kind::ReExport && self.contains(module.file, to);
                if to != module.file && !is_module && !hands_on {
                    found.insert(Arrow {
                        from: module.file,
                        to,
                        line: *line,
                        import: path.join("::"),
                    });
                }
            }
        }
        found.into_iter().collect()
    }

    /// Where a path leads, as written in a module; `None` if to another crate.
    fn resolve(&self, from: usize, path: &[String], depth: usize) -> Option<Target> {
        let (head, rest) = path.split_first()?;
        match head.as_str() {
            "crate" => self.within(0, rest, depth),
            "self" | "super" => self.within(from, path, depth),
            _ if self.modules[from].offers(head) => self.within(from, path, depth),
            _ => self.by_glob(from, path, depth),
        }
    }

    /// Where a path leads from this module.
    fn within(&self, index: usize, path: &[String], depth: usize) -> Option<Target> {
        let Some((head, rest)) = path.split_first() else {
            return Some(Target {
                module: index,
                is_module: true,
            });
        };
        let here = Target {
            module: index,
            is_module: false,
        };
        let depth = depth.checked_sub(1)?;
        let module = &self.modules[index];
        if head == "self" {
            return self.within(index, rest, depth);
        }
        if head == "super" {
            return self.within(module.parent?, rest, depth);
        }
        if let Some(&child) = module.children.get(head) {
            return self.within(child, rest, depth);
        }
        if let Some(target) = module.names.get(head) {
            // `use log;`: another crate.
            if target.first() == Some(head) {
                return None;
            }
            let path: Vec<_> = target.iter().chain(rest).cloned().collect();
            return self.resolve(index, &path, depth);
        }
        if module.defined.contains(head) {
            return Some(here);
        }
        self.by_glob(index, path, depth).or(Some(here))
    }

    /// The same, in the modules of which everything is imported here.
    fn by_glob(&self, index: usize, path: &[String], depth: usize) -> Option<Target> {
        let depth = depth.checked_sub(1)?;
        self.modules[index].globs.iter().find_map(|glob| {
            let target = self.resolve(index, glob, depth)?.module;
            let offers = target != index && self.modules[target].offers(&path[0]);
            offers.then(|| self.within(target, path, depth)).flatten()
        })
    }

    /// Reads a module from its file. `dir` has its children.
    fn add_file(
        &mut self,
        path: &Path,
        dir: &Path,
        parent: Option<usize>,
        name: &str,
        read: &impl Fn(&Path) -> Option<String>,
    ) -> Result<()> {
        let source = read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let file = self.files.len();
        self.files.push(path.to_owned());
        let module = self.add(file, parent, name);
        let tokens = tokens(&source);
        self.add_items(module, &tokens, dir, read)
            .with_context(|| format!("cannot make out {}", path.display()))
    }

    fn add(&mut self, file: usize, parent: Option<usize>, name: &str) -> usize {
        let index = self.modules.len();
        if let Some(parent) = parent {
            let children = &mut self.modules[parent].children;
            children.insert(name.to_owned(), index);
        }
        self.modules.push(Module {
            file,
            parent,
            children: BTreeMap::new(),
            names: BTreeMap::new(),
            globs: vec![],
            defined: BTreeSet::new(),
            paths: vec![],
        });
        index
    }

    /// Reads what a module contains.
    fn add_items(
        &mut self,
        module: usize,
        tokens: &[(Token<'_>, usize)],
        dir: &Path,
        read: &impl Fn(&Path) -> Option<String>,
    ) -> Result<()> {
        let mut at = 0;
        while at < tokens.len() {
            let (token, line) = tokens[at];
            let following = |by: usize| tokens.get(at + by).map(|of| of.0);
            match token {
                Token::Mark('#') => {
                    let (end, only_tests) = attribute(tokens, at);
                    at = if only_tests {
                        item_end(tokens, end)
                    } else {
                        end
                    };
                }
                Token::Word("mod") => match (following(1), following(2)) {
                    (Some(Token::Word(name)), Some(Token::Mark(';'))) => {
                        at += 3;
                        let below = dir.join(name);
                        let paths = [dir.join(format!("{name}.rs")), below.join("mod.rs")];
                        let Some(path) = paths.iter().find(|path| read(path).is_some()) else {
                            bail!("line {line}: no file for module {name}");
                        };
                        self.add_file(path, &below, Some(module), name, read)?;
                    }
                    (Some(Token::Word(name)), Some(Token::Mark('{'))) => {
                        let end = group_end(tokens, at + 2);
                        let inside = &tokens[at + 3..end.max(at + 4) - 1];
                        let file = self.modules[module].file;
                        let child = self.add(file, Some(module), name);
                        self.add_items(child, inside, &dir.join(name), read)?;
                        at = end;
                    }
                    _ => at += 1,
                },
                Token::Word("use") if following(1) != Some(Token::Mark('<')) => {
                    let before = at.checked_sub(1).map(|before| tokens[before].0);
                    let is_public = matches!(before, Some(Token::Word("pub") | Token::Mark(')')));
                    let kind = if is_public {
                        Kind::ReExport
                    } else {
                        Kind::Import
                    };
                    at = self.add_use(module, tokens, at + 1, &[], kind);
                }
                Token::Word(word) if following(1) == Some(Token::Separator) => {
                    let mut path = vec![word.to_owned()];
                    at += 1;
                    while let [(Token::Separator, _), (Token::Word(next), _), ..] = tokens[at..] {
                        path.push(next.to_owned());
                        at += 2;
                    }
                    // `::<` of a generic function.
                    at += usize::from(tokens.get(at).is_some_and(|of| of.0 == Token::Separator));
                    // `parse::<u16>()` names no module.
                    if path.len() > 1 {
                        let kind = Kind::Use;
                        self.modules[module]
                            .paths
                            .push(Mention { path, line, kind });
                    }
                }
                Token::Word(word) => {
                    if DEFINING.contains(&word)
                        && let Some(Token::Word(name)) = following(1)
                    {
                        self.modules[module].defined.insert(name.to_owned());
                    }
                    at += 1;
                }
                _ => at += 1,
            }
        }
        Ok(())
    }

    /// Reads a tree of imports. Returns where it ends.
    fn add_use(
        &mut self,
        module: usize,
        tokens: &[(Token<'_>, usize)],
        mut at: usize,
        prefix: &[String],
        kind: Kind,
    ) -> usize {
        let mut path = prefix.to_vec();
        while let Some(&(token, line)) = tokens.get(at) {
            at += 1;
            match token {
                Token::Separator => {}
                Token::Word("as") => {
                    // `path` is complete, and was not added yet: see below.
                    if let Some((Token::Word(name), _)) = tokens.get(at) {
                        self.modules[module].add_name(name, &path);
                    }
                    return at + 1;
                }
                Token::Word(word) => {
                    let is_self = word == "self" && !path.is_empty();
                    if !is_self {
                        path.push(word.to_owned());
                    }
                    match tokens.get(at).map(|of| of.0) {
                        Some(Token::Separator) => {}
                        Some(Token::Word("as")) => {
                            self.modules[module].add(&path, line, kind);
                        }
                        _ => {
                            self.modules[module].add(&path, line, kind);
                            if let Some(name) = path.last().cloned() {
                                self.modules[module].add_name(&name, &path);
                            }
                            return at;
                        }
                    }
                }
                Token::Mark('*') => {
                    self.modules[module].add(&path, line, Kind::Use);
                    self.modules[module].globs.push(path);
                    return at;
                }
                Token::Mark('{') => loop {
                    match tokens.get(at).map(|of| of.0) {
                        None => return at,
                        Some(Token::Mark('}')) => return at + 1,
                        Some(Token::Mark(',')) => at += 1,
                        Some(_) => at = self.add_use(module, tokens, at, &path, kind),
                    }
                },
                _ => return at,
            }
        }
        at
    }
}

/// Keywords that a new name follows.
const DEFINING: [&str; 9] = [
    "fn",
    "struct",
    "enum",
    "trait",
    "type",
    "const",
    "static",
    "union",
    "macro_rules",
];

impl Module {
    fn offers(&self, name: &str) -> bool {
        self.children.contains_key(name)
            || self.names.contains_key(name)
            || self.defined.contains(name)
    }

    fn add(&mut self, path: &[String], line: usize, kind: Kind) {
        self.paths.push(Mention {
            path: path.to_vec(),
            line,
            kind,
        });
    }

    fn add_name(&mut self, name: &str, path: &[String]) {
        if name != "_" {
            self.names
                .entry(name.to_owned())
                .or_insert_with(|| path.to_vec());
        }
    }
}

/// The end of the attribute at `at`, and whether what it is for is compiled for tests only.
fn attribute(tokens: &[(Token<'_>, usize)], at: usize) -> (usize, bool) {
    let mut start = at + 1;
    start += usize::from(tokens.get(start).is_some_and(|of| of.0 == Token::Mark('!')));
    if tokens.get(start).map(|of| of.0) != Some(Token::Mark('[')) {
        return (at + 1, false);
    }
    let end = group_end(tokens, start);
    let word = |by: usize| tokens.get(start + by).map(|of| of.0);
    let cfg = word(1) == Some(Token::Word("cfg"));
    let simple = word(3) == Some(Token::Word("test"));
    let all = word(3) == Some(Token::Word("all")) && word(5) == Some(Token::Word("test"));
    (end, cfg && (simple || all))
}

/// The end of the item, or of the attribute before it, that begins at `at`: past its `;` or its last brace.
fn item_end(tokens: &[(Token<'_>, usize)], mut at: usize) -> usize {
    while let Some((token, _)) = tokens.get(at) {
        match token {
            Token::Mark(';') => return at + 1,
            Token::Mark('{') => return group_end(tokens, at),
            Token::Mark('(' | '[') => at = group_end(tokens, at),
            _ => at += 1,
        }
    }
    at
}

/// The end of the brackets that open at `at`.
fn group_end(tokens: &[(Token<'_>, usize)], mut at: usize) -> usize {
    let mut depth = 0_usize;
    while let Some((token, _)) = tokens.get(at) {
        at += 1;
        match token {
            Token::Mark('(' | '[' | '{') => depth += 1,
            Token::Mark(')' | ']' | '}') => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    break;
                }
            }
            _ => {}
        }
    }
    at
}

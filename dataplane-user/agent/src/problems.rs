//! The log of the problems of a source's views.

use std::collections::HashSet;

use model::Problem;
use tracing::{info, warn};

/// How many problems of a view are logged one by one.
const LOGGED: usize = 20;

/// Logs new problems, and those that are over.
pub fn log(problems: &[Problem], before: &[Problem]) {
    let mut news = not_among(problems, before);
    for problem in news.by_ref().take(LOGGED) {
        warn!("{}: {}", problem.place, problem.text);
    }
    let more = news.count();
    if more > 0 {
        warn!("and {more} more; `dataplane status` names them all");
    }
    let mut over = not_among(before, problems);
    for problem in over.by_ref().take(LOGGED) {
        info!("{}: no longer so: {}", problem.place, problem.text);
    }
    let more = over.count();
    if more > 0 {
        info!("and {more} more problems are over");
    }
}

/// Returns the problems of `some` whose place or text is not in `others`.
fn not_among<'a>(some: &'a [Problem], others: &'a [Problem]) -> impl Iterator<Item = &'a Problem> {
    let key = |problem: &'a Problem| (&*problem.place, &*problem.text);
    let known: HashSet<_> = others.iter().map(key).collect();
    some.iter()
        .filter(move |problem| !known.contains(&key(problem)))
}

//! The log of the problems of a source's views.

use std::collections::HashSet;

use model::Problem;
use tracing::{info, warn};

/// How many problems of a view are logged one by one.
const LOGGED: usize = 20;

/// Logs new problems, and those that are over.
pub fn log(problems: &[Problem], before: &[Problem]) {
    let known: HashSet<(&str, &str)> = before.iter().map(|p| (&*p.place, &*p.text)).collect();
    let mut news = problems
        .iter()
        .filter(|p| !known.contains(&(&*p.place, &*p.text)));
    for problem in news.by_ref().take(LOGGED) {
        warn!("{}: {}", problem.place, problem.text);
    }
    let more = news.count();
    if more > 0 {
        warn!("and {more} more; `dataplane status` names them all");
    }
    let now: HashSet<(&str, &str)> = problems.iter().map(|p| (&*p.place, &*p.text)).collect();
    let mut over = before
        .iter()
        .filter(|p| !now.contains(&(&*p.place, &*p.text)));
    for problem in over.by_ref().take(LOGGED) {
        info!("{}: no longer so: {}", problem.place, problem.text);
    }
    let more = over.count();
    if more > 0 {
        info!("and {more} more problems are over");
    }
}

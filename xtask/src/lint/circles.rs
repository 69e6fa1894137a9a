//! Circles in a graph.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Who leads to whom.
pub type Graph = BTreeMap<usize, BTreeSet<usize>>;

/// Returns a shortest circle through each knot of the graph: the nodes in order, each once. Knots are parts in which
/// every node leads to every other one.
pub fn circles(graph: &Graph) -> Vec<Vec<usize>> {
    let mut through: Vec<_> = (graph.keys())
        .filter_map(|&node| way(graph, node, node))
        .collect();
    through.sort_by_key(Vec::len);
    let mut found: Vec<Vec<usize>> = vec![];
    for circle in through {
        let of_known = |known: &Vec<usize>| {
            way(graph, known[0], circle[0]).is_some() && way(graph, circle[0], known[0]).is_some()
        };
        if !found.iter().any(of_known) {
            found.push(circle);
        }
    }
    found
}

/// Returns a shortest way of at least one step: all nodes but the last.
pub fn way(graph: &Graph, from: usize, to: usize) -> Option<Vec<usize>> {
    let mut before = BTreeMap::new();
    let mut queue = VecDeque::from([from]);
    while let Some(node) = queue.pop_front() {
        for &next in graph.get(&node).into_iter().flatten() {
            if next == to {
                let mut way = vec![node];
                while let Some(&earlier) = way
                    .last()
                    .filter(|&&last| last != from)
                    .and_then(|last| before.get(last))
                {
                    way.push(earlier);
                }
                way.reverse();
                return Some(way);
            }
            if next != from && !before.contains_key(&next) {
                before.insert(next, node);
                queue.push_back(next);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(arrows: &[(usize, usize)]) -> Graph {
        let mut graph = Graph::new();
        for &(from, to) in arrows {
            graph.entry(from).or_default().insert(to);
        }
        graph
    }

    #[test]
    fn a_graph_whose_arrows_run_one_way_has_none() {
        let graph = graph(&[(1, 2), (1, 3), (2, 4), (3, 4)]);
        assert_eq!(circles(&graph), [] as [Vec<usize>; 0]);
        assert_eq!(way(&graph, 1, 4), Some(vec![1, 2]));
        assert_eq!(way(&graph, 4, 1), None);
    }

    #[test]
    fn the_shortest_circle_of_each_knot_is_found() {
        let graph = graph(&[
            (1, 2),
            (2, 3),
            (3, 1),
            (3, 2),
            (3, 5),
            (5, 6),
            (6, 7),
            (7, 5),
        ]);
        assert_eq!(circles(&graph), [vec![2, 3], vec![5, 6, 7]]);
    }
}

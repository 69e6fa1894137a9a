//! Where workloads are, as the node knows: by its own routes, or by CNI's records. Facts that a workload can set
//! itself, such as its addresses, decide nothing.

use std::{
    collections::HashMap,
    fs, io,
    net::IpAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use kernel::{
    capture::{Namespace, Pairs},
    namespaces,
};
use model::{Place, Workload, WorkloadName};

use super::cni_results::{RESULTS, Results};

/// A property by which a network namespace is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sign {
    /// The number that it has in the node's network namespace: it has the other end of a pair.
    Number(i32),
    /// The device and the number of its file.
    File((u64, u64)),
}

/// The signs of all workloads that were looked for.
pub struct Places {
    /// By workload; the reason if they are not known.
    of: HashMap<WorkloadName, Result<Vec<Sign>, String>>,
    /// The ends of pairs to which the node's routes lead, if known.
    pairs: Option<Pairs>,
}

impl Places {
    /// Looks for the signs of these workloads, in the node's network namespace.
    pub fn look<'a>(workloads: impl IntoIterator<Item = &'a Workload>) -> Self {
        let (mut pairs, unread) = match Pairs::read() {
            Ok(pairs) => (Some(pairs), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let mut results = None;
        let mut of = HashMap::new();
        for workload in workloads {
            let signs = match (&mut pairs, &unread) {
                (Some(pairs), _) => signs(workload, pairs, &mut results),
                (None, error) => Err(format!(
                    "cannot read the node's interfaces: {}",
                    error.as_deref().unwrap_or_default()
                )),
            };
            of.insert(workload.name.clone(), signs);
        }
        Self { of, pairs }
    }

    /// Forgets numbers that may have been reused for other network namespaces since [`Places::look`]: the kernel gives
    /// the number of a namespace that is gone to the next one. Call this after the visit in which the namespaces' signs
    /// were read.
    pub fn confirm(&mut self) {
        let Some(before) = &self.pairs else { return };
        let now = Pairs::read();
        for of in self.of.values_mut() {
            let Ok(signs) = of else { continue };
            match &now {
                Ok(now) => signs.retain(|sign| match sign {
                    Sign::Number(number) => before.leads_as(now, *number),
                    Sign::File(_) => true,
                }),
                Err(error) => *of = Err(format!("cannot read the node's interfaces: {error}")),
            }
        }
    }

    /// Returns a workload's signs.
    ///
    /// # Errors
    /// The reason why they are not known.
    pub fn of(&self, workload: &WorkloadName) -> Result<&[Sign], &str> {
        match self.of.get(workload) {
            Some(Ok(signs)) => Ok(signs),
            Some(Err(error)) => Err(error),
            None => Ok(&[]),
        }
    }

    /// The signs of all workloads.
    pub fn all(&self) -> impl Iterator<Item = Sign> {
        self.of.values().flatten().flatten().copied()
    }

    /// Whether the signs of all workloads are known.
    pub fn are_known(&self) -> bool {
        self.of.values().all(Result::is_ok)
    }

    /// The signs of a network namespace.
    ///
    /// # Errors
    /// If the kernel does not return them.
    pub fn signs_of(&mut self, namespace: &Namespace) -> io::Result<Vec<Sign>> {
        let number = match &mut self.pairs {
            Some(pairs) => pairs.number(namespace)?,
            None => None,
        };
        let number = number.map(Sign::Number);
        Ok(number
            .into_iter()
            .chain([Sign::File(namespace.inode)])
            .collect())
    }
}

/// Returns the file of the network namespace to which an address was assigned, as the node knows; `None` if it knows
/// none.
///
/// # Errors
/// The reason why it cannot be found out.
pub fn namespace_with(addr: IpAddr) -> Result<Option<PathBuf>, String> {
    let mut workload = Workload::new(WorkloadName::new("", ""), Place::Address);
    workload.addresses.extend([addr]);
    let mut places = Places::look([&workload]);
    let wanted = places.of(&workload.name)?.to_vec();
    let mut found = None;
    namespaces::visit(|path| {
        if found.is_none() {
            let its = places.signs_of(&kernel::capture::this_namespace()?)?;
            let is_it = its.iter().any(|sign| wanted.contains(sign));
            found = is_it.then(|| path.to_owned());
        }
        Ok(())
    });
    Ok(found)
}

fn signs(
    workload: &Workload,
    pairs: &mut Pairs,
    results: &mut Option<Result<Results, String>>,
) -> Result<Vec<Sign>, String> {
    let mut found = Vec::new();
    for addr in &workload.addresses {
        let behind = pairs.behind(*addr);
        let told = behind.map_err(|error| {
            format!("cannot find out which interface of the node leads to {addr}: {error}")
        })?;
        match told {
            Some(number) => found.push(Sign::Number(number)),
            None => found.extend(noted(workload, *addr, results)?),
        }
    }
    Ok(found)
}

/// The signs by CNI's records.
fn noted(
    workload: &Workload,
    addr: IpAddr,
    results: &mut Option<Result<Results, String>>,
) -> Result<Vec<Sign>, String> {
    let read = || {
        let told = |error| format!("cannot read CNI's results in {RESULTS}: {error}");
        Results::read(Path::new(RESULTS)).map_err(told)
    };
    let results = results.get_or_insert_with(read).as_ref()?;
    let mut found = Vec::new();
    for path in results.of(workload, addr) {
        match fs::metadata(&path) {
            Ok(metadata) => found.push(Sign::File((metadata.dev(), metadata.ino()))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(format!("cannot look at {}: {error}", path.display())),
        }
    }
    Ok(found)
}

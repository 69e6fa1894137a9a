//! Brings capture in line with a snapshot: [`Mesh::settle`] has the order of the phases.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane_common::capture::Enrolled;
use kernel::{
    Kernel,
    capture::{Capture, Namespace},
    namespaces,
};
use model::{ServiceName, Snapshot, Workload, WorkloadName, authorization::PolicyName};
use plan::{
    Captured,
    enrol::{
        Enrolment, Member, Problem, Retained, Unknown, consequence, fit_addresses, known, limited,
        may_be_refused, members_again, missing_root, unread, unusable_waypoints,
    },
};
use proxy::{Proxy, handover};
use tracing::{error, warn};

use super::{
    Mesh,
    discover::{Placed, Sought, is_to_be_denied},
    dns::Dns,
    found::Found,
    guard,
    problems::{Problems, not_attached},
};

/// The problem of a workload whose rules do not fit.
const OVER_BUDGET: &str = "its rules name more ports, ranges, users, groups and interfaces than its namespace's budget \
     in tables RULES and RANGES has room for, so these lists have no effect: all of its connections are captured that \
     the configuration does not exclude. Use shorter lists";

/// The consequence of [`plan::enrol::Unlisted::hbone`].
const WITHOUT_HBONE: &str = "table KNOWN has no room for the addresses of all Pods that speak HBONE, so all connections of \
     workloads with identities go to the proxy, and none passes while the proxy does not listen";

/// How long the agent remembers that the log has named the objects of a namespace, after it has none.
const REMEMBERED: Duration = Duration::from_hours(1);

/// The state of capture after [`Mesh::settle`].
pub struct Settled {
    /// The workloads, for `status` and metrics.
    pub workloads: Vec<Enrolment>,
    /// Why some of it may be wrong: facts that could not be read.
    pub trouble: Option<String>,
    /// Why the proxy takes fewer connections than configured.
    pub shortage: Option<String>,
    /// Entries that the tables have no room for, and that no captured workload has asked for; and Istio's objects that
    /// nothing enforces.
    pub left_out: Vec<String>,
    /// Istio's policies that refuse connections in the kernel, with their numbers.
    pub refusers: Vec<(u32, PolicyName)>,
}

/// The facts of one run: the snapshot, and the network namespaces of this machine.
struct View<'a> {
    snapshot: &'a Snapshot,
    members: &'a [Member],
    /// The members that are captured by the packets that they send.
    by_packets: Vec<&'a Member>,
    /// Other workloads, whose namespaces the guard may have to let go.
    others: Vec<&'a Workload>,
    found: Found,
    /// Whether another layout's programs still serve.
    waits: bool,
}

/// The result of one run before it is written and reported. Each phase adds to it.
#[derive(Default)]
pub(super) struct Draft {
    wanted: Captured,
    pub(super) problems: Problems,
    /// As [`Settled::trouble`].
    pub(super) trouble: Option<String>,
    /// As [`Settled::left_out`].
    left_out: Vec<String>,
    /// The workloads whose policies the kernel enforces.
    by_kernel: BTreeSet<WorkloadName>,
}

impl Draft {
    /// Whether processes of the node are captured by their cgroup.
    fn has_cgroups(&self) -> bool {
        let mut entries = self.wanted.cgroups.values();
        entries.any(|entry| entry.flags & Enrolled::PROXY != 0)
    }
}

impl Mesh {
    /// Brings everything in line with a snapshot and with the present network namespaces. A workload that cannot be
    /// found or attached delays no other: it has a problem. If a fact cannot be read, the earlier state stays.
    ///
    /// # Errors
    /// The kernel refuses tables or programs; the workloads that were captured before still are.
    pub fn settle(
        &mut self,
        kernel: &mut Kernel,
        snapshot: &Snapshot,
    ) -> Result<Settled, kernel::Error> {
        let snapshot = &self.cni.complete(snapshot);
        let members = members_again(&self.said, snapshot, &mut self.judge);
        self.certify(&members);
        let of_node = Member::of_node(snapshot);
        let held = kernel.capture().held();
        let view = self.look(snapshot, &members, held, kernel.waits());
        let mut draft = Draft {
            trouble: view.found.trouble(),
            left_out: self.name_limits(snapshot, &members),
            ..Draft::default()
        };
        if let Some(encryption) = &self.encryption {
            draft.left_out.extend(encryption.problems());
        }
        let mut placed = self.place(&view, &of_node, held, &mut draft);
        let guard = self.decide_guard(&view, &placed.sought, held, &mut draft);
        self.open_sockets(kernel, &view, &placed, &mut draft);
        self.add_packets(kernel, &view, &mut placed, &mut draft);
        self.complete_tables(kernel.capture(), &view, &mut placed, guard, &mut draft);
        self.write(kernel, &view, &placed, guard, &mut draft)?;
        if !view.waits {
            let is_enforced = |member: &Member| {
                !member.by_kernel || draft.by_kernel.contains(&member.workload.name)
            };
            let failed = self.end_forbidden(kernel, snapshot, &placed.enrolled, is_enforced);
            draft.left_out.extend(failed);
        }
        self.close_sockets(&view, &placed, &draft);
        let is_unread = draft.trouble.is_some() || !placed.unknown.is_empty() || view.waits;
        draft
            .left_out
            .extend(self.end_boot_guard(kernel, &members, is_unread)?);
        self.cni.retain(|cookie| view.found.may_exist(cookie));
        let (tables, problems) = (kernel.capture().tables(), &draft.problems);
        self.answer_cni(tables, snapshot, &members, problems, view.waits);
        let held = kernel.capture().held();
        let verified = self.verify(held, &members, &placed, &draft, view.waits);
        self.accept(&members, &verified);
        if !view.waits {
            draft.left_out.extend(self.annotate(verified));
            draft.left_out.extend(self.untold(&placed));
        }
        let mut flags = placed.enrolled.iter().map(|(_, _, flags)| flags);
        let by_sockets = flags.any(|flags| flags & Enrolled::PROXY != 0);
        Ok(self.report(members, by_sockets, draft))
    }

    /// Looks for the workloads. `held`: the present contents of the tables.
    fn look<'a>(
        &self,
        snapshot: &'a Snapshot,
        members: &'a [Member],
        held: &Captured,
        waits: bool,
    ) -> View<'a> {
        // If the guard may have to let other namespaces go, their workloads have to be known.
        let careful = self.config.guard
            || self.guarded
            || self.has_boot_guard()
            || members.iter().any(is_to_be_denied);
        let others = guard::others(snapshot, members).filter(|_| careful);
        let others: Vec<&Workload> = others.collect();
        let search = self.wanted(members, &others, held);
        View {
            snapshot,
            members,
            by_packets: members.iter().filter(|m| m.is_by_packets()).collect(),
            found: Found::look(&search, self.own_cookie),
            others,
            waits,
        }
    }

    /// Names Istio's objects that limit connections of workloads, in the log each namespace once.
    fn name_limits(&mut self, snapshot: &Snapshot, members: &[Member]) -> Vec<String> {
        let istio = &snapshot.istio;
        let limited = limited(istio, members, self.said.sidecars);
        let then = (!limited.is_empty()).then(|| consequence(istio).to_owned());
        let now = Instant::now();
        for (namespace, text) in &limited {
            if self.limited.insert(Arc::clone(namespace), now).is_none() {
                warn!("mesh: {text}; {}", consequence(istio));
            }
        }
        let missing = missing_root(snapshot, members, self.said.sidecars);
        if let Some(text) = &missing
            && self.limited.insert(Arc::clone(&istio.root), now).is_none()
        {
            warn!("mesh: {text}");
        }
        self.limited
            .retain(|_, last| now.duration_since(*last) < REMEMBERED);
        let unread = unread(istio, members, self.said.sidecars);
        let waypoints = unusable_waypoints(snapshot, members, self.said.sidecars);
        let limited = then.into_iter().chain(limited.into_values());
        let others = [missing, unread].into_iter().flatten();
        limited.chain(others).chain(waypoints).collect()
    }

    /// Enrols the workloads that are captured by their sockets.
    fn place<'a>(
        &mut self,
        view: &'a View<'a>,
        of_node: &'a Member,
        held: &Captured,
        draft: &mut Draft,
    ) -> Placed<'a> {
        let (wanted, problems) = (&mut draft.wanted, &mut draft.problems);
        let mut placed = self.enrol_all(view.members, &view.found, held, wanted, problems);
        // The kernel distinguishes workloads in the node's own namespace, but the proxy does not: it treats them as the
        // node.
        if let Ok(own) = &view.found.own
            && draft.has_cgroups()
        {
            let flags = Enrolled::CAPTURED | Enrolled::PROXY;
            placed.enrolled.push((of_node, own, flags));
        }
        draft.left_out.extend(excluded(&placed.excluded));
        let problems = &mut draft.problems;
        for member in view.members.iter().filter(|member| member.over_budget) {
            problems.add(&member.workload.name, Problem::of_workload(OVER_BUDGET));
        }
        for member in view.members {
            for text in &member.ineffective {
                problems.add(&member.workload.name, Problem::of_workload(text));
            }
        }
        placed
    }

    /// Decides whether a guard keeps unknown network namespaces closed, and lets go those that need not stay closed.
    /// Returns whether there is a guard.
    fn decide_guard(
        &mut self,
        view: &View<'_>,
        sought: &Sought,
        held: &Captured,
        draft: &mut Draft,
    ) -> bool {
        let everybody = self.config.guard || self.has_boot_guard() || sought.by_operator;
        let some = !sought.uids.is_empty() && namespaces::sees_all_processes().unwrap_or(false);
        let guard = everybody || some;
        // Namespaces that the guard let go are in the table until there is no guard any more.
        if guard || self.guarded {
            let only = (guard && !everybody).then_some(&sought.uids);
            let wanted = &mut draft.wanted;
            let others = self.let_go_of_others(&view.others, &view.found, held, only, wanted);
            draft.left_out.extend(others.said);
            draft.trouble = draft.trouble.take().or(others.trouble);
        }
        guard
    }

    /// Opens the proxy's and the DNS server's sockets, before connections and queries are captured.
    fn open_sockets(
        &mut self,
        kernel: &Kernel,
        view: &View<'_>,
        placed: &Placed<'_>,
        draft: &mut Draft,
    ) {
        let enrolled = &placed.enrolled;
        self.change_over(enrolled, &view.by_packets);
        // While another layout's programs serve, the earlier proxy serves, too: its programs would not recognise this
        // proxy's connections.
        if !view.waits {
            let problems = &mut draft.problems;
            self.listen(kernel, enrolled, problems);
            self.listen_for_interfaces(kernel, enrolled, problems);
            if let Some(dns) = &mut self.dns {
                let (given, published) = (&mut self.given, &self.published);
                let queries =
                    dns.answer_enrolled(view.snapshot, published, enrolled, given, problems);
                for (cookie, to) in queries {
                    let wanted = &mut draft.wanted;
                    self.enroller.capture_queries(cookie, &to, wanted);
                }
            }
        }
        let unread = self.dns.as_ref().and_then(Dns::unread);
        draft.left_out.extend(unread.cloned());
    }

    /// Enrols the workloads that are captured by their packets.
    fn add_packets(
        &mut self,
        kernel: &Kernel,
        view: &View<'_>,
        placed: &mut Placed<'_>,
        draft: &mut Draft,
    ) {
        self.remember_packets(kernel.capture().held(), view.members);
        let (wanted, problems) = (&mut draft.wanted, &mut draft.problems);
        let failed = self.capture_packets(kernel, &view.by_packets, &view.found, wanted, problems);
        placed.unknown.extend(failed.unknown);
        draft.trouble = draft.trouble.take().or(failed.trouble);
    }

    /// Adds the entries and levels that stay from before, and the known endpoints; removes the addresses that do not
    /// fit.
    fn complete_tables(
        &self,
        capture: &Capture,
        view: &View<'_>,
        placed: &mut Placed<'_>,
        guard: bool,
        draft: &mut Draft,
    ) {
        let wanted = &mut draft.wanted;
        let kept = Retained {
            seen: &view.found.told(),
            own_cookie: self.own_cookie,
            earlier: self.enroller.earlier(),
            guarded_unread: guard && view.found.trouble().is_some(),
            unknown: &placed.unknown,
        };
        wanted.keep(capture.held(), |workload, cookie| {
            kept.has(workload, cookie)
        });
        let mut unknown = placed.unknown.values();
        if unknown.any(|place| *place == Unknown::Cgroup) {
            placed.levels |= capture.tables().config().levels;
        }
        if !view.members.is_empty() {
            let unknown = known(view.snapshot, view.members, wanted);
            draft.left_out.extend(unknown_endpoints(&unknown.endpoints));
            let hbone = unknown.hbone.then(|| WITHOUT_HBONE.to_owned());
            draft.left_out.extend(hbone);
        }
        let left_out = fit_addresses(wanted);
        for (name, number) in self.enroller.numbers() {
            if let Some(count) = left_out.get(&number) {
                draft.problems.add(name, too_many_addresses(*count));
            }
        }
    }

    /// Writes the tables and attaches the programs, between the routing rules that have to go before and those that have
    /// to come after.
    fn write(
        &mut self,
        kernel: &mut Kernel,
        view: &View<'_>,
        placed: &Placed<'_>,
        guard: bool,
        draft: &mut Draft,
    ) -> Result<(), kernel::Error> {
        let enrolled = &placed.enrolled;
        let inbound: Vec<&Namespace> = enrolled
            .iter()
            .filter(|(_, _, flags)| flags & Enrolled::LOOKED_UP != 0)
            .map(|(_, namespace, _)| *namespace)
            .collect();
        self.unroute_interfaces(&view.found, &draft.wanted);
        let has_workloads = !draft.wanted.locals.is_empty();
        let istio = &view.snapshot.istio;
        let may_refuse = || {
            enrolled.iter().any(|(member, _, flags)| {
                let is_judged = flags & Enrolled::LOOKED_UP != 0;
                flags & Enrolled::REFUSES_INBOUND != 0
                    || is_judged && may_be_refused(istio, &member.workload)
            })
        };
        draft
            .left_out
            .extend(self.leave_probes_alone(kernel, has_workloads, may_refuse));
        let failed = kernel.set_captured(&draft.wanted, placed.levels, &inbound, guard)?;
        self.guarded = guard;
        let problems = &mut draft.problems;
        if !view.waits {
            let failed = |cookie| failed.contains_key(&cookie);
            self.route_interfaces(enrolled, &placed.machines, failed, problems);
        }
        for (member, namespace, flags) in enrolled {
            let name = &member.workload.name;
            if let Some(error) = failed.get(&namespace.cookie) {
                problems.add(name, not_attached(&error.to_string(), *flags));
            } else if member.by_kernel {
                draft.by_kernel.insert(name.clone());
            }
        }
        Ok(())
    }

    /// Releases the workloads that are no longer captured, and the earlier agent.
    fn close_sockets(&mut self, view: &View<'_>, placed: &Placed<'_>, draft: &Draft) {
        let (found, own_cookie) = (&view.found, self.own_cookie);
        let own_unread = found.own.is_err() && draft.has_cgroups();
        self.release(&placed.enrolled, found, |cookie| {
            let is_kept =
                !found.seen.contains_key(&cookie) && draft.wanted.namespaces.contains_key(&cookie);
            is_kept || cookie == own_cookie && own_unread
        });
        if !view.waits {
            if draft.trouble.is_none() {
                // The workloads of these sockets are no longer captured.
                self.given.clear();
            }
            if let Some(before) = self.before.take() {
                handover::serves(before);
            }
        }
    }

    /// Logs new problems, and returns the state of each workload. `by_sockets`: whether the proxy takes the connections
    /// of a workload in its network namespace.
    fn report(&mut self, members: Vec<Member>, by_sockets: bool, draft: Draft) -> Settled {
        draft.problems.tell(&self.problems);
        self.problems = draft.problems;
        let enrolment = |member: Member| {
            let by_kernel = draft.by_kernel.contains(&member.workload.name);
            Enrolment {
                number: self.enroller.number(&member.workload.name),
                problem: self.problems.of(&member.workload.name).cloned(),
                rules: member.rules,
                by_kernel,
                closed: member.closed.filter(|_| by_kernel),
                workload: member.workload,
            }
        };
        let workloads: Vec<_> = members.into_iter().map(enrolment).collect();
        let shortage = self.proxy.as_ref().and_then(Proxy::shortage);
        let unseen = self.unseen.clone().filter(|_| by_sockets);
        let trouble = unseen.into_iter().chain(draft.trouble);
        let trouble = trouble.reduce(|first, second| format!("{first}; {second}"));
        for (text, before) in [(&trouble, &self.trouble), (&shortage, &self.shortage)] {
            if let Some(text) = text
                && before.as_ref() != Some(text)
            {
                error!("mesh: {text}");
            }
        }
        self.trouble.clone_from(&trouble);
        self.shortage.clone_from(&shortage);
        let numbers = workloads.iter().map(|enrolment| enrolment.number);
        self.enroller.keep_numbers(&numbers.collect());
        self.enroller.keep_policies(&draft.wanted);
        let refusers = self.enroller.refusers();
        let refusers = refusers.map(|(number, name)| (number, name.clone()));
        let refusers = refusers.collect();
        Settled {
            workloads,
            trouble,
            shortage,
            left_out: draft.left_out,
            refusers,
        }
    }
}

/// Names the services and pods whose endpoints are not known to workloads with `egress: deny`.
fn unknown_endpoints(services: &[ServiceName]) -> Option<String> {
    let (first, more) = services.split_first()?;
    let others = match more.len() {
        0 => String::new(),
        more => format!(" and of {more} more services and pods"),
    };
    Some(format!(
        "table KNOWN has no room for the endpoints of {first}{others}, whose namespaces have too many: workloads \
         with egress: deny cannot connect to these endpoints. Use fewer endpoints and ports"
    ))
}

/// Names the pods that are not captured because the configuration excludes their namespaces, although its rules capture all
/// pods.
fn excluded(pods: &[&WorkloadName]) -> Option<String> {
    let names: Vec<String> = pods.iter().map(ToString::to_string).collect();
    (!names.is_empty()).then(|| {
        format!(
            "the rules of the configuration ask to capture {}; not captured, because mesh.excludeNamespaces has their namespace",
            names.join(", ")
        )
    })
}

fn too_many_addresses(left_out: usize) -> Problem {
    Problem::of_workload(format!(
        "it has too many addresses: table LOCALS has no room for {left_out} of them, and connections to these are not \
         captured. Name fewer addresses"
    ))
}

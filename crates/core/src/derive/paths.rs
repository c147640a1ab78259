//! The paths of nested scopes by name, and their summary.

use std::{collections::HashMap, sync::Arc};

use super::{LedgerView, Names, pools};
use crate::{
    ledger::{GroupAtPeak, NodeId, ScopeNode, ScopePeriod},
    model::{Bytes, CallsiteId, Device, Family, ScopeId, ShortNames, name_in_line},
    report::{Path, ScopeSummary, Summary},
};

/// Returns the current and the highest memory of each scope. `under` is an unused id for a peak that is kept during the call;
/// `not_intercepted` is the reason if nothing is intercepted.
pub fn summary(view: &dyn LedgerView, names: &dyn Names, under: ScopeId, not_intercepted: Option<String>) -> Summary {
    let counts = view.counts();
    let mut paths = Paths::now(view, names);
    paths.find_peaks(view, under);
    let pools = pools(view, names);
    // The ledger counts all other wrong calls of pools.
    let lost = counts.lost + pools.iter().map(|pool| pool.overlapping).sum::<u64>();
    Summary { pools, ..Summary::of(paths.written_out(), counts.untracked, lost, not_intercepted) }
}

/// Returns the names of these scopes, as reports currently show them.
pub fn short_names(view: &dyn LedgerView, names: &dyn Names, scopes: &[CallsiteId]) -> Vec<String> {
    let known = view.nodes().into_iter().map(|(_, node)| node.callsite);
    let full: Vec<_> = known.chain(scopes.iter().copied()).map(|id| names.callsite(id).to_string()).collect();
    let short = ShortNames::of(full.iter().map(String::as_str));
    full[full.len() - scopes.len()..].iter().map(|name| short.get(name).to_owned()).collect()
}

/// Returns the names of the scopes around the one with this period, as the line of its trace shows them. A scope that the program did not
/// name is left out, because its place would make each line inside it longer.
pub fn outer_names(view: &dyn LedgerView, names: &dyn Names, period: &ScopePeriod) -> Vec<String> {
    let name = |id| Some(name_in_line(&names.callsite(id).name?).into_owned());
    view.scopes_around(period).into_iter().filter_map(name).collect()
}

/// All scope paths. Paths share the names of their scopes, because full copies would be many times as long.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    /// The paths, without their names and places.
    all: Vec<Path>,
    /// The innermost scope of each path.
    scopes: Vec<Arc<Scope>>,
    /// The outermost path of each device.
    roots: Vec<(Device, usize)>,
    /// The index of each node's path, by node id. The node outside all scopes has none.
    at: Vec<Option<usize>>,
}

#[derive(Debug)]
struct Scope {
    name: String,
    full_name: String,
    place: Option<String>,
}

impl Paths {
    /// Reads the current paths.
    pub fn now(view: &dyn LedgerView, names: &dyn Names) -> Self {
        let nodes = view.nodes();
        let mut scopes: HashMap<CallsiteId, (String, Option<String>)> = HashMap::new();
        for (_, node) in &nodes {
            scopes.entry(node.callsite).or_insert_with(|| {
                let callsite = names.callsite(node.callsite);
                (callsite.to_string(), callsite.place())
            });
        }
        let short = ShortNames::of(scopes.values().map(|(full_name, _)| full_name.as_str()));
        let with_name = |(id, (full_name, place)): (&CallsiteId, &(String, Option<String>))| {
            let name = short.get(full_name).to_owned();
            (*id, Arc::new(Scope { name, full_name: full_name.clone(), place: place.clone() }))
        };
        let scopes: HashMap<_, _> = scopes.iter().map(with_name).collect();
        let mut paths = Self::default();
        for (device, node) in &nodes {
            paths.at.push(device.map(|device| {
                let parent = paths.at[node.parent.0 as usize];
                if parent.is_none() {
                    paths.roots.push((device, paths.all.len()));
                }
                paths.all.push(Path { parent, own: own(device, node) });
                paths.scopes.push(Arc::clone(&scopes[&node.callsite]));
                paths.all.len() - 1
            }));
        }
        paths
    }

    /// Returns the paths with names and places.
    fn written_out(self) -> Vec<Path> {
        let paths: Vec<_> = (0..self.all.len()).map(|at| self.names(at, |scope| scope.name.clone())).collect();
        let mut all = self.all;
        for ((Path { own, .. }, path), scope) in all.iter_mut().zip(paths).zip(&self.scopes) {
            (own.path, own.place) = (path, scope.place.clone());
        }
        all
    }

    /// Sets the memory of each path at the peak of its device, without the paths inside it.
    fn find_peaks(&mut self, view: &dyn LedgerView, under: ScopeId) {
        for (device, root) in &self.roots {
            if !view.keep_device_peak(*device, under, true) {
                continue;
            }
            let kept = view.kept_peak(under);
            view.release_peak(under);
            let Some((peak, groups)) = kept else { continue };
            let peak = Bytes::new(peak.bytes.get().max(0).unsigned_abs());
            // Both are from the same moment. The peak may have risen since the paths were read.
            self.all[*root].own.peak = peak;
            self.all[*root].own.device_peak = peak;
            for GroupAtPeak { group, bytes } in groups.into_iter().filter(|at| at.group.is_in_program()) {
                // Memory in scopes that were opened after the paths were read counts at least for the process.
                let at = self.index(group.node).unwrap_or(*root);
                let own = &mut self.all[at].own;
                own.at_peak = own.at_peak + Bytes::new(bytes.get().max(0).unsigned_abs());
            }
        }
    }

    /// Returns the index of a node's path. `None` for a path that was created later.
    fn index(&self, node: NodeId) -> Option<usize> {
        self.at.get(node.0 as usize).copied().flatten()
    }

    /// Returns a value for each scope of a path, the outermost first.
    fn names<T>(&self, index: usize, of: impl Fn(&Scope) -> T) -> Vec<T> {
        let (mut at, mut path) = (index, Vec::new());
        // The outermost node is the whole process.
        while let Some(parent) = self.all[at].parent {
            path.push(of(&self.scopes[at]));
            at = parent;
        }
        path.reverse();
        path
    }

    /// Returns the full names of the scopes of a node, the outermost first. They do not depend on other scopes.
    pub(super) fn full_names_of(&self, node: NodeId) -> Vec<String> {
        self.index(node).map(|at| self.names(at, |scope| scope.full_name.clone())).unwrap_or_default()
    }

    /// Returns the names of the scopes of a node, the outermost first.
    pub fn names_of(&self, node: NodeId) -> Vec<String> {
        self.index(node).map(|at| self.names(at, |scope| scope.name.clone())).unwrap_or_default()
    }

    /// Returns the length of these names and of the place where the innermost scope is opened, in bytes.
    pub fn length_of(&self, node: NodeId) -> usize {
        let Some(at) = self.index(node) else { return 0 };
        let names: usize = self.names(at, |scope| scope.name.len()).into_iter().sum();
        names + self.scopes[at].place.as_ref().map_or(0, String::len)
    }

    /// Returns the place where the innermost scope of a node is opened.
    pub fn place_of(&self, node: NodeId) -> Option<String> {
        self.scopes[self.index(node)?].place.clone()
    }
}

fn own(device: Device, node: &ScopeNode) -> ScopeSummary {
    let amount = |bytes: i64| Bytes::new(bytes.max(0).unsigned_abs());
    ScopeSummary {
        path: Vec::new(),
        place: None,
        device: device.ordinal,
        simulated: device.family == Family::Simulated,
        calls: node.calls,
        used: amount(node.in_use),
        peak: amount(node.peak),
        // For the root, and if the scope was not opened for this device, only its own peak is known. If the scope was handed to
        // other threads, they may have stayed in it after it was closed.
        device_peak: amount(node.device_peak.max(node.peak)),
        at_peak: Bytes::ZERO,
        allocated: Bytes::new(node.allocated),
        allocations: node.allocations,
    }
}

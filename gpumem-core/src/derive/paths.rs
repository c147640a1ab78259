//! The paths of nested scopes, by name, and the summary that is made of them.

use super::{Callsite, LedgerView, Names};
use crate::{
    ledger::{GroupAtPeak, NodeId, ScopeNode},
    model::{Bytes, CallsiteId, Device, Family, ScopeId, ShortNames},
    report::{Path, ScopeSummary, Summary},
};

/// What each scope holds, and held at most. `under` is a number for a peak that is kept meanwhile; `not_intercepted` says why
/// nothing is intercepted, if that is so.
pub fn summary(view: &dyn LedgerView, names: &dyn Names, under: ScopeId, not_intercepted: Option<String>) -> Summary {
    let counts = view.counts();
    let mut paths = Paths::now(view, names);
    paths.find_peaks(view, under);
    Summary::of(paths.all, counts.untracked, counts.lost, not_intercepted)
}

/// The names of these scopes, as reports show them now.
pub fn short_names(view: &dyn LedgerView, names: &dyn Names, scopes: &[CallsiteId]) -> Vec<String> {
    let known = view.nodes().into_iter().map(|(_, node)| node.callsite);
    let full: Vec<_> = known.chain(scopes.iter().copied()).map(|id| names.callsite(id).to_string()).collect();
    let short = ShortNames::of(full.iter().map(String::as_str));
    full[full.len() - scopes.len()..].iter().map(|name| short.get(name).to_owned()).collect()
}

/// All paths of scopes.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    all: Vec<Path>,
    /// The full names of the innermost scopes, for each of them.
    full_names: Vec<String>,
    /// The outermost of each device.
    roots: Vec<(Device, usize)>,
    /// By the number of the node. Nowhere has none.
    at: Vec<Option<usize>>,
}

impl Paths {
    /// As they are now.
    pub fn now(view: &dyn LedgerView, names: &dyn Names) -> Self {
        let nodes = view.nodes();
        let callsites: Vec<_> = nodes.iter().map(|(_, node)| names.callsite(node.callsite)).collect();
        let full: Vec<_> = callsites.iter().map(ToString::to_string).collect();
        let short = ShortNames::of(full.iter().map(String::as_str));
        let mut full_names = Vec::with_capacity(nodes.len());
        let mut paths: Vec<Path> = Vec::with_capacity(nodes.len());
        let mut at: Vec<Option<usize>> = Vec::with_capacity(nodes.len());
        let mut roots = Vec::new();
        for ((device, node), (callsite, full)) in nodes.iter().zip(callsites.iter().zip(&full)) {
            at.push(device.map(|device| {
                let parent = at[node.parent.0 as usize];
                let outer = parent.map(|parent: usize| paths[parent].own.path.as_slice()).unwrap_or_default();
                let own = own(device, node, outer, callsite, short.get(full));
                full_names.push(full.clone());
                if parent.is_none() {
                    roots.push((device, paths.len()));
                }
                paths.push(Path { parent, own });
                paths.len() - 1
            }));
        }
        Self { all: paths, full_names, roots, at }
    }

    /// Fills in what each path, without the paths inside it, had in use at the peak of its device.
    fn find_peaks(&mut self, view: &dyn LedgerView, under: ScopeId) {
        for (device, root) in &self.roots {
            if !view.keep_device_peak(*device, under) {
                continue;
            }
            let kept = view.kept_peak(under);
            view.release_peak(under);
            let Some((peak, groups)) = kept else { continue };
            let peak = Bytes::new(peak.bytes.get().max(0).unsigned_abs());
            // Both of one moment: it may have risen since the paths were read.
            self.all[*root].own.peak = peak;
            self.all[*root].own.device_peak = peak;
            for GroupAtPeak { group, bytes } in groups {
                // In scopes that are newer than the paths, it is of the process at least.
                let at = self.at.get(group.node.0 as usize).copied().flatten().unwrap_or(*root);
                let own = &mut self.all[at].own;
                own.at_peak = own.at_peak + Bytes::new(bytes.get().max(0).unsigned_abs());
            }
        }
    }

    /// `None` for a path that is newer than this.
    pub fn of(&self, node: NodeId) -> Option<&ScopeSummary> {
        let at = self.at.get(node.0 as usize).copied().flatten()?;
        Some(&self.all[at].own)
    }

    /// The full names of the scopes of a node, the outermost first. They stay the same, whatever other scopes there are.
    pub(super) fn full_names_of(&self, node: NodeId) -> Vec<String> {
        let mut at = self.at.get(node.0 as usize).copied().flatten();
        let mut path = Vec::new();
        while let Some(index) = at {
            at = self.all[index].parent;
            // The outermost node is the whole process.
            if at.is_some() {
                path.push(self.full_names[index].clone());
            }
        }
        path.reverse();
        path
    }

    /// The names of the scopes of a node, the outermost first.
    pub fn names_of(&self, node: NodeId) -> Vec<String> {
        self.of(node).map(|scope| scope.path.clone()).unwrap_or_default()
    }

    /// Where the innermost scope of a node is opened.
    pub fn place_of(&self, node: NodeId) -> Option<String> {
        self.of(node)?.place.clone()
    }
}

fn own(device: Device, node: &ScopeNode, outer: &[String], callsite: &Callsite, name: &str) -> ScopeSummary {
    let is_root = node.callsite == CallsiteId::NONE;
    let amount = |bytes: i64| Bytes::new(bytes.max(0).unsigned_abs());
    ScopeSummary {
        path: outer.iter().cloned().chain((!is_root).then(|| name.to_owned())).collect(),
        place: callsite.place(),
        device: device.ordinal,
        simulated: device.family == Family::Simulated,
        calls: node.calls,
        used: amount(node.in_use),
        peak: amount(node.peak),
        // Of the root, and where the scope was not opened for this device, its own peak is all that is known. Where it was handed to
        // other threads, they may have gone on in it after it was closed.
        device_peak: amount(node.device_peak.max(node.peak)),
        at_peak: Bytes::ZERO,
        allocated: Bytes::new(node.allocated),
        allocations: node.allocations,
    }
}

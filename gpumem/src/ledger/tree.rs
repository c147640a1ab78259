//! The tree of scopes: what each path of nested scopes holds, and held at most.
//!
//! An allocation counts for its own spot and all spots above it, but the next event is likely to be of the same spot, or of one
//! nearby. So each outermost scope has a finger, on the spot of its newest event; what came of the events below a spot is told
//! to it when the finger leaves that way, as one sum and one highest point. An event costs as much as the finger moves: nothing
//! within one scope, a step where one is opened or closed, however deep they lie. What is above all scopes, the whole
//! device, is counted by its meter.

use std::collections::HashMap;

use crate::model::{Bytes, SiteId};

/// Deeper scopes are not told apart.
const DEEPEST: u8 = 64;
/// Nor are more of them.
const MOST: usize = 1 << 16;

/// A path of nested scopes, on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct SpotId(pub(crate) u32);

impl SpotId {
    /// Outside of all scopes, on no device in particular.
    pub(crate) const NONE: Self = Self(0);
}

/// What is known of one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    /// `NONE` above a device's outermost spot, which stands for what is outside of all scopes.
    pub(crate) parent: SpotId,
    /// The innermost scope of the path.
    pub(crate) site: SiteId,
    pub(super) meter: u16,
    depth: u8,
    /// The outermost scope that it is in; `NONE` outside of all.
    top: SpotId,
    /// Of an outermost scope: the spot of its newest event. Only from there up to it anything is still to be told.
    finger: SpotId,
    /// What is still to be told to the parent.
    untold: Untold,
    /// How often it was opened.
    pub(crate) calls: u64,
    /// Here, without the scopes inside.
    pub(crate) allocations: u64,
    /// Bytes in all, here, without the scopes inside.
    pub(crate) allocated: u64,
    /// With the scopes inside.
    pub(crate) in_use: i64,
    /// The most that was ever in use, with the scopes inside.
    pub(crate) peak: i64,
    /// The most that the process had in use on the device while the scope was open.
    pub(crate) device_peak: i64,
}

#[derive(Debug)]
#[repr(C)]
pub(super) struct Tree {
    known: HashMap<(SpotId, SiteId), SpotId>,
    /// By meter: the outermost spot.
    roots: Vec<SpotId>,
    /// Number 0 is nowhere.
    spots: Vec<Spot>,
    run: Run,
}

/// Neighbouring events of one spot, not yet counted there.
#[derive(Debug, Default)]
struct Run {
    spot: SpotId,
    untold: Untold,
    allocations: u64,
    allocated: u64,
}

/// What several events come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Untold {
    change: i64,
    /// The highest that `change` was.
    most: i64,
}

impl Untold {
    /// More events, after these.
    #[inline]
    fn then(&mut self, next: Self) {
        self.most = self.most.max(self.change + next.most);
        self.change += next.change;
    }
}

impl Default for Tree {
    fn default() -> Self {
        let nowhere = Spot::new(SpotId::NONE, SiteId::NONE, u16::MAX, 0, SpotId::NONE);
        Self { run: Run::default(), spots: vec![nowhere], known: HashMap::new(), roots: Vec::new() }
    }
}

impl Spot {
    const fn new(parent: SpotId, site: SiteId, meter: u16, depth: u8, top: SpotId) -> Self {
        let (calls, allocations, allocated, in_use, peak, device_peak) = (0, 0, 0, 0, 0, 0);
        let (finger, untold) = (top, Untold { change: 0, most: 0 });
        Self {
            parent,
            site,
            meter,
            depth,
            top,
            finger,
            untold,
            calls,
            allocations,
            allocated,
            in_use,
            peak,
            device_peak,
        }
    }

    fn take(&mut self, events: Untold) {
        self.peak = self.peak.max(self.in_use + events.most);
        self.in_use += events.change;
        self.untold.then(events);
    }
}

impl Tree {
    /// The newest change was a block that was allocated.
    #[inline]
    pub(super) fn count(&mut self, bytes: Bytes) {
        self.run.allocations += 1;
        self.run.allocated += bytes.get();
    }

    /// What a spot holds is so much more, or less.
    #[inline]
    pub(super) fn change(&mut self, spot: SpotId, by: i64) {
        if self.run.spot != spot {
            self.move_to(spot);
        }
        self.run.untold.then(Untold { change: by, most: by });
    }

    #[inline(never)]
    fn move_to(&mut self, spot: SpotId) {
        self.end_run();
        self.run.spot = spot;
        self.move_finger(spot);
    }

    fn end_run(&mut self) {
        let Run { spot, untold, allocations, allocated } = std::mem::take(&mut self.run);
        let spot = &mut self.spots[spot.0 as usize];
        spot.allocations += allocations;
        spot.allocated += allocated;
        spot.take(untold);
    }

    /// From wherever the finger of this spot's outermost scope is, by the shortest way.
    fn move_finger(&mut self, spot: SpotId) {
        let top = self.spot(spot).top;
        if top == SpotId::NONE {
            return;
        }
        let mut left = std::mem::replace(&mut self.spots[top.0 as usize].finger, spot);
        let mut entered = spot;
        while left != entered {
            if self.spot(left).depth >= self.spot(entered).depth {
                left = self.tell_parent(left);
            } else {
                entered = self.spot(entered).parent;
            }
        }
    }

    fn tell_parent(&mut self, spot: SpotId) -> SpotId {
        let spot = &mut self.spots[spot.0 as usize];
        let (untold, parent) = (std::mem::take(&mut spot.untold), spot.parent);
        self.spots[parent.0 as usize].take(untold);
        parent
    }

    /// The spot of a scope that is opened inside another; the same one each time.
    pub(super) fn inside(&mut self, outer: SpotId, site: SiteId) -> SpotId {
        if let Some(known) = self.known.get(&(outer, site)) {
            return *known;
        }
        let Spot { meter, depth, site: outer_site, .. } = *self.spot(outer);
        if outer_site == SiteId::OTHERS {
            return outer;
        }
        if site != SiteId::OTHERS && (depth == DEEPEST || self.spots.len() >= MOST) {
            // Inside the scope that they are in, which they count for. It is one for each, so there are at most twice as many.
            return self.inside(outer, SiteId::OTHERS);
        }
        let next = SpotId(u32::try_from(self.spots.len()).expect("fewer spots than that are made"));
        let top = if depth == 0 { next } else { self.spot(outer).top };
        self.spots.push(Spot::new(outer, site, meter, depth + 1, top));
        self.known.insert((outer, site), next);
        next
    }

    /// The spot of the same path on another device.
    pub(super) fn on(&mut self, meter: u16, spot: SpotId) -> SpotId {
        let Spot { parent, site, meter: own, .. } = *self.spot(spot);
        if own == meter {
            return spot;
        }
        if spot == SpotId::NONE || parent == SpotId::NONE {
            return self.root(meter);
        }
        let outer = self.on(meter, parent);
        self.inside(outer, site)
    }

    pub(super) fn root(&mut self, meter: u16) -> SpotId {
        let at = usize::from(meter);
        if at >= self.roots.len() {
            self.roots.resize(at + 1, SpotId::NONE);
        }
        if self.roots[at] == SpotId::NONE {
            self.roots[at] = SpotId(u32::try_from(self.spots.len()).expect("fewer spots than that are made"));
            self.spots.push(Spot::new(SpotId::NONE, SiteId::NONE, meter, 0, SpotId::NONE));
        }
        self.roots[at]
    }

    pub(super) fn spot(&self, spot: SpotId) -> &Spot {
        &self.spots[spot.0 as usize]
    }

    pub(super) fn opened(&mut self, spot: SpotId) {
        self.spots[spot.0 as usize].calls += 1;
    }

    /// The process had so much in use on the device while the scope was open.
    pub(super) fn device_had(&mut self, spot: SpotId, in_use: i64) {
        let spot = &mut self.spots[spot.0 as usize];
        spot.device_peak = spot.device_peak.max(in_use);
    }

    /// All spots, each after its parent; number 0 is nowhere. What a device's outermost spot has in use, and had, is not said.
    pub(super) fn spots(&mut self) -> &[Spot] {
        self.end_run();
        for at in 0..self.spots.len() {
            if self.spots[at].depth == 1 {
                self.move_finger(self.spots[at].top);
            }
        }
        &self.spots
    }

    /// Whether a spot is another or lies inside it, by their paths: they may be on different devices.
    pub(super) fn is_inside(&self, mut spot: SpotId, outer: SpotId) -> bool {
        let depth = self.spot(outer).depth;
        while self.spot(spot).depth > depth {
            spot = self.spot(spot).parent;
        }
        self.is_same_path(spot, outer)
    }

    fn is_same_path(&self, mut one: SpotId, mut other: SpotId) -> bool {
        while one != other {
            let (a, b) = (self.spot(one), self.spot(other));
            if (a.depth, a.site) != (b.depth, b.site) {
                return false;
            }
            (one, other) = (a.parent, b.parent);
        }
        true
    }
}

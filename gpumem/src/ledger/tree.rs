//! The tree of scopes: what each path of nested scopes holds, and held at most.
//!
//! An allocation counts for its own spot and all spots above it, but the next event is likely to be of the same spot, or of one
//! nearby. So each outermost scope has a finger, on the spot of its newest event; what came of the events below a spot is told
//! to it when the finger leaves that way, as one sum and one highest point. An event costs as much as the finger moves: nothing
//! within one scope, a step where one is opened or closed, however deep they lie. What is above all scopes, the whole
//! device, is counted by its meter.

use std::collections::HashMap;

use super::run::{Sum, Sums};
use crate::model::SiteId;

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
    untold: Sum,
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
}

impl Default for Tree {
    fn default() -> Self {
        let nowhere = Spot::new(SpotId::NONE, SiteId::NONE, u16::MAX, 0, SpotId::NONE);
        Self { spots: vec![nowhere], known: HashMap::new(), roots: Vec::new() }
    }
}

impl Spot {
    const fn new(parent: SpotId, site: SiteId, meter: u16, depth: u8, top: SpotId) -> Self {
        let (calls, allocations, allocated, in_use, peak, device_peak) = (0, 0, 0, 0, 0, 0);
        let (finger, untold) = (top, Sum::NOTHING);
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

    #[inline]
    fn take(&mut self, events: Sum) {
        self.peak = self.peak.max(self.in_use + events.most);
        self.in_use += events.change;
        self.untold.append(events);
    }
}

impl Tree {
    /// What came of several blocks of a spot, one after the other.
    #[inline]
    pub(super) fn take(&mut self, spot: SpotId, sums: &Sums) {
        self.move_finger(spot);
        let spot = &mut self.spots[spot.0 as usize];
        spot.allocations += sums.allocations;
        spot.allocated = spot.allocated.saturating_add(sums.allocated);
        spot.take(sums.bytes);
    }

    /// From wherever the finger of this spot's outermost scope is, by the shortest way.
    #[inline]
    fn move_finger(&mut self, spot: SpotId) {
        let top = self.spot(spot).top;
        if top != SpotId::NONE && self.spot(top).finger != spot {
            self.move_finger_of(top, spot);
        }
    }

    #[inline(never)]
    fn move_finger_of(&mut self, top: SpotId, spot: SpotId) {
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

    /// The scopes around a spot and its own, the outermost first.
    pub(super) fn path(&self, mut spot: SpotId) -> Vec<SiteId> {
        let mut path = Vec::new();
        while self.spot(spot).depth > 0 {
            path.push(self.spot(spot).site);
            spot = self.spot(spot).parent;
        }
        path.reverse();
        path
    }

    pub(super) fn opened(&mut self, spot: SpotId) {
        self.spots[spot.0 as usize].calls += 1;
    }

    /// A scope that was opened at one spot is at another from now on. It was opened once.
    pub(super) fn reopened(&mut self, from: SpotId, to: SpotId) {
        let calls = &mut self.spots[from.0 as usize].calls;
        *calls = calls.saturating_sub(1);
        self.opened(to);
    }

    /// The process had so much in use on the device while the scope was open.
    pub(super) fn device_had(&mut self, spot: SpotId, in_use: i64) {
        let spot = &mut self.spots[spot.0 as usize];
        spot.device_peak = spot.device_peak.max(in_use);
    }

    /// So many spots from this number on, each after its parent; number 0 is nowhere. What a device's outermost spot has in use,
    /// and had, is not said.
    pub(super) fn spots(&mut self, first: usize, count: usize) -> &[Spot] {
        let first = first.min(self.spots.len());
        let end = self.spots.len().min(first + count);
        for at in first..end {
            // What came of the events below is told to all up to there.
            self.move_finger(self.spots[at].top);
        }
        &self.spots[first..end]
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

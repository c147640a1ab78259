//! The tree of scopes: what each path of nested scopes holds, and held at most.
//!
//! An allocation counts for its own spot and all spots above it, but events come in runs from one and the same spot; a run
//! is kept apart and counted upwards when another spot is at it. So an event costs the same however deep its scope lies.

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

/// Neighbouring events of one spot, not yet counted upwards.
#[derive(Debug, Default)]
struct Run {
    spot: SpotId,
    change: i64,
    /// The highest that `change` was.
    most: i64,
    allocations: u64,
    allocated: u64,
}

impl Default for Tree {
    fn default() -> Self {
        let nowhere = Spot::new(SpotId::NONE, SiteId::NONE, u16::MAX, 0);
        Self { run: Run::default(), spots: vec![nowhere], known: HashMap::new(), roots: Vec::new() }
    }
}

impl Spot {
    const fn new(parent: SpotId, site: SiteId, meter: u16, depth: u8) -> Self {
        let (calls, allocations, allocated, in_use, peak, device_peak) = (0, 0, 0, 0, 0, 0);
        Self { parent, site, meter, depth, calls, allocations, allocated, in_use, peak, device_peak }
    }
}

impl Tree {
    /// A block was allocated at a spot.
    #[inline]
    pub(super) fn allocated(&mut self, spot: SpotId, bytes: Bytes) {
        self.change(spot, bytes.get().cast_signed());
        self.run.allocations += 1;
        self.run.allocated += bytes.get();
    }

    /// What a spot holds is so much more, or less.
    #[inline]
    pub(super) fn change(&mut self, spot: SpotId, by: i64) {
        if self.run.spot != spot {
            self.count_upwards();
            self.run.spot = spot;
        }
        self.run.change += by;
        self.run.most = self.run.most.max(self.run.change);
    }

    #[inline(never)]
    fn count_upwards(&mut self) {
        let Run { spot, change, most, allocations, allocated } = std::mem::take(&mut self.run);
        let of_run = &mut self.spots[spot.0 as usize];
        of_run.allocations += allocations;
        of_run.allocated += allocated;
        let mut at = spot;
        while at != SpotId::NONE {
            let spot = &mut self.spots[at.0 as usize];
            spot.peak = spot.peak.max(spot.in_use + most);
            spot.in_use += change;
            at = spot.parent;
        }
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
        let spot = self.push(Spot::new(outer, site, meter, depth + 1));
        self.known.insert((outer, site), spot);
        spot
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
            self.roots[at] = self.push(Spot::new(SpotId::NONE, SiteId::NONE, meter, 0));
        }
        self.roots[at]
    }

    fn push(&mut self, spot: Spot) -> SpotId {
        self.spots.push(spot);
        SpotId(u32::try_from(self.spots.len() - 1).expect("fewer spots than that are made"))
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

    /// All spots, each after its parent; number 0 is nowhere.
    pub(super) fn spots(&mut self) -> &[Spot] {
        self.count_upwards();
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

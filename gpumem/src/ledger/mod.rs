//! The fold of all events: bytes in use, live blocks and the peak of every open scope. Pure: no clock, no lock, no I/O,
//! so a live run and a replayed one agree by construction.

mod live;
mod watermark;

use std::{collections::HashMap, time::Duration};

use self::{
    live::Live,
    watermark::{Mark, Watermark},
};
use crate::model::{
    ByteDelta, Bytes, Device, Event, EventKind, Family, Gauge, GpuMemory, Sampling, ScopeId, Time, Trace,
};

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    live: Live,
    meters: Meters,
    scopes: HashMap<ScopeId, Scope>,
    lost: u64,
}

/// One for each device and gauge; a handful, so a search beats a hash.
#[derive(Debug, Default)]
struct Meters(Vec<Meter>);

/// Bytes in use on one device as one gauge sees them.
#[derive(Debug)]
struct Meter {
    device: Device,
    gauge: Gauge,
    /// Signed: blocks that are older than the session may be given back, and samples count down from what is free.
    in_use: i64,
    peaks: Watermark<i64>,
    samples: Samples,
}

/// How a device was sampled, of which an open scope is told its own part.
#[derive(Debug)]
struct Samples {
    count: u64,
    newest: Option<Time>,
    gaps: Watermark<Duration>,
    /// The newest attempt failed.
    failed: bool,
}

/// An open scope.
#[derive(Debug)]
struct Scope {
    meter: usize,
    every: Duration,
    start: i64,
    peak: Mark,
    gap: Mark,
    /// Samples of the device before the one that this scope began with.
    samples_before: u64,
    /// The device could not be read when this scope began (a reset may meet that), so nobody knows what it began with.
    blind: bool,
    lost_before: u64,
}

impl Ledger {
    /// Takes one event in; answers what a scope has come to where the event asks for it.
    pub(crate) fn apply(&mut self, event: &Event) -> Option<Trace> {
        match event.kind {
            EventKind::Alloc(block) => {
                let replaced = self.live.insert(&block).unwrap_or(Bytes::ZERO);
                let meter = self.meters.of(block.device, Gauge::Exact);
                meter.change(-signed(replaced));
                meter.change(signed(block.bytes));
                None
            }
            EventKind::Free { device, address, bytes } => {
                let bytes = self.live.remove(device, address).or(bytes).unwrap_or(Bytes::ZERO);
                self.meters.of(device, Gauge::Exact).change(-signed(bytes));
                None
            }
            EventKind::Sample { device, memory } => {
                self.meters.of(device, Gauge::Sampled).sample(event.time, &memory);
                None
            }
            EventKind::Unread { device } => {
                self.meters.of(device, Gauge::Sampled).samples.failed = true;
                None
            }
            EventKind::Open { scope, device, gauge, every } => {
                let meter = self.meters.index(device, gauge);
                let opened = self.begin(meter, every);
                self.scopes.insert(scope, opened);
                None
            }
            EventKind::Read { scope } => self.scopes.get(&scope).map(|open| self.trace(open)),
            EventKind::Reset { scope } => {
                let (meter, every) = self.scopes.get(&scope).map(|open| (open.meter, open.every))?;
                let trace = self.end(scope);
                let opened = self.begin(meter, every);
                self.scopes.insert(scope, opened);
                trace
            }
            EventKind::Close { scope } => self.end(scope),
            EventKind::Lost { count } => {
                self.lost += count;
                None
            }
        }
    }

    fn begin(&mut self, meter: usize, every: Duration) -> Scope {
        let Meter { in_use, peaks, samples, .. } = &mut self.meters.0[meter];
        Scope {
            meter,
            every,
            start: *in_use,
            peak: peaks.open(*in_use),
            gap: samples.gaps.open(Duration::ZERO),
            samples_before: samples.count.saturating_sub(1),
            blind: samples.failed,
            lost_before: self.lost,
        }
    }

    fn trace(&self, scope: &Scope) -> Trace {
        let Meter { device, gauge, in_use: end, peaks, samples, .. } = &self.meters.0[scope.meter];
        let peak = peaks.max_since(scope.peak);
        let sampled = *gauge == Gauge::Sampled;
        Trace {
            device: device.ordinal,
            simulated: device.family == Family::Simulated,
            gauge: *gauge,
            used: ByteDelta::new(end - scope.start),
            peaked: Bytes::new(peak.abs_diff(scope.start.max(*end))),
            sampling: sampled.then(|| Sampling {
                every: scope.every,
                readings: samples.count - scope.samples_before,
                longest_gap: samples.gaps.max_since(scope.gap),
            }),
            stale: sampled && (samples.failed || scope.blind),
            lost: self.lost - scope.lost_before,
        }
    }

    fn end(&mut self, scope: ScopeId) -> Option<Trace> {
        let open = self.scopes.remove(&scope)?;
        let trace = self.trace(&open);
        let meter = &mut self.meters.0[open.meter];
        meter.peaks.close(open.peak);
        meter.samples.gaps.close(open.gap);
        Some(trace)
    }
}

impl Meters {
    fn index(&mut self, device: Device, gauge: Gauge) -> usize {
        let known = self.0.iter().position(|meter| meter.device == device && meter.gauge == gauge);
        known.unwrap_or_else(|| {
            let samples = Samples { count: 0, newest: None, gaps: Watermark::new(), failed: false };
            self.0.push(Meter { device, gauge, in_use: 0, peaks: Watermark::new(), samples });
            self.0.len() - 1
        })
    }

    fn of(&mut self, device: Device, gauge: Gauge) -> &mut Meter {
        let index = self.index(device, gauge);
        &mut self.0[index]
    }
}

fn signed(bytes: Bytes) -> i64 {
    i64::try_from(bytes.get()).unwrap_or(i64::MAX)
}

impl Meter {
    fn change(&mut self, by: i64) {
        self.in_use = self.in_use.saturating_add(by);
        self.peaks.raise(self.in_use);
    }

    /// In use is what is no longer free: that is the one figure which NVML in both its versions and `cuMemGetInfo`
    /// agree on.
    fn sample(&mut self, time: Time, memory: &GpuMemory) {
        self.in_use = -signed(memory.free);
        self.peaks.raise(self.in_use);
        if let Some(before) = self.samples.newest.replace(time) {
            self.samples.gaps.raise(time.saturating_sub(before));
        }
        self.samples.count += 1;
        self.samples.failed = false;
    }
}

#[cfg(test)]
mod tests;

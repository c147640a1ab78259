//! Reads burn's devices, and has the scopes around code.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use burn::tensor::Device;
use cubecl::{MemoryPoolKind, MemoryPoolReport, client::Client};
use cubecl_common::device::{Device as _, DeviceId};
use gpumem::{GpuMemTrace, GpuMemTraceBuilder, scope::Threads};

use crate::{
    Summary,
    reservations::{self, DeviceThread, Reserved, lock},
    scopes::{Reading, Scopes},
};

static DEVICES: Mutex<Option<HashMap<DeviceId, Arc<Mutex<Scopes>>>>> = Mutex::new(None);

/// A device of cubecl.
struct Cube<'a> {
    device: &'a Device,
    client: Client,
    thread: DeviceThread,
    /// The ordinal of a CUDA device.
    cuda: Option<u32>,
    scopes: Arc<Mutex<Scopes>>,
}

impl<'a> Cube<'a> {
    /// Returns the number of a device of cubecl. `None` for a device of another backend.
    fn new(device: &'a Device) -> Option<Self> {
        device.memory_pool_usage()?;
        // burn numbers its backends in the upper half, and the rest is cubecl's.
        let mut id = device.as_dispatch().to_id();
        id.type_id &= 0xff;
        let cube = cubecl::Device::from_id(id);
        let cuda = match &cube {
            cubecl::Device::Cuda(cuda) => u32::try_from(cuda.index).ok(),
            _ => None,
        };
        let thread = DeviceThread::new(id.type_id, id.index_id.into());
        let scopes = lock(&DEVICES).get_or_insert_default().entry(id).or_default().clone();
        Some(Self { device, client: cube.client(), thread, cuda, scopes })
    }

    /// Waits for the device and reads it. `None` if it fails.
    fn point(&self) -> Option<(Reading, Reserved)> {
        self.device.sync().ok()?;
        let mut reserved = reservations::take(self.thread);
        let reading = self.read();
        // Memory that another thread reserved meanwhile is in both stretches.
        reserved.add(&reservations::peek(self.thread));
        Some((reading, reserved))
    }

    fn read(&self) -> Reading {
        let report = self.client.memory_report(cubecl::MemoryScope::Device);
        let mut reading = Reading::default();
        let auxiliary = report.streams.iter().flat_map(|stream| stream.auxiliary.iter().map(|memory| &memory.pools));
        for pools in report.streams.iter().map(|stream| &stream.pools).chain(auxiliary) {
            for pool in pools.dynamic.iter().chain([&pools.persistent, &pools.dedicated]) {
                add(&mut reading, pool);
            }
        }
        reading
    }
}

fn add(reading: &mut Reading, pool: &MemoryPoolReport) {
    reading.pages += pool.usage.bytes_reserved;
    if let MemoryPoolKind::Sliced { .. } | MemoryPoolKind::Adaptive { .. } = pool.kind {
        reading.shared += pool.usage.bytes_in_use;
        return;
    }
    reading.other += pool.usage.bytes_in_use;
    reading.other_pages += pool.usage.bytes_reserved;
    reading.other_largest = reading.other_largest.max(pool.largest_alloc);
    if !matches!(pool.kind, MemoryPoolKind::Persistent) {
        let most = pool.pages_peak.saturating_mul(pool.largest_alloc);
        reading.returned_at_most = reading.returned_at_most.saturating_add(most);
    }
}

/// Runs `code` as a scope. Its row in [`summary`](fn@summary) has the exact memory that it left in use, and bounds of
/// its peak.
///
/// It waits for the device before and after `code`, so that all work and all frees of `code` count here. So it costs the time in which
/// the program would prepare work while the device computes.
///
/// The figures are those of the whole device: allocations of other threads meanwhile count here too. One thread at a time has scopes on
/// a device; while it has one, scopes of other threads run their code and are not measured, which the summary says.
///
/// On CUDA, the pages that cubecl takes from the driver in this time count for the scope of this name in `gpumem::summary()`.
pub fn scope<R>(device: &Device, name: &str, code: impl FnOnce() -> R) -> R {
    let Some(open) = Cube::new(device).and_then(|cube| OpenScope::begin(cube, name)) else { return code() };
    let result = code();
    open.end();
    result
}

struct OpenScope<'a> {
    cube: Cube<'a>,
    trace: Option<GpuMemTrace>,
    pages: u64,
    is_over: bool,
}

impl<'a> OpenScope<'a> {
    fn begin(cube: Cube<'a>, name: &str) -> Option<Self> {
        if !lock(&cube.scopes).is_free() {
            return None;
        }
        let Some((reading, reserved)) = cube.point() else {
            lock(&cube.scopes).count_unmeasured();
            return None;
        };
        // If gpumem cannot intercept a driver, it sees no pages.
        let adopting =
            |ordinal| GpuMemTrace::builder().ctx(name).device(ordinal).adopt(Threads::named("DSD-")).silent(true);
        let trace = cube.cuda.map(adopting).and_then(|builder: GpuMemTraceBuilder| builder.start().ok());
        lock(&cube.scopes).begin(name, reading, &reserved);
        Some(Self { cube, trace, pages: reading.pages, is_over: false })
    }

    fn end(mut self) {
        let Some((reading, reserved)) = self.cube.point() else { return };
        let pages_at_most = self.pages_at_most(&reading);
        lock(&self.cube.scopes).end(reading, &reserved, pages_at_most);
        self.is_over = true;
    }

    /// Returns the highest memory that cubecl had from the driver. `None` if other memory changed as well.
    fn pages_at_most(&self, reading: &Reading) -> Option<u64> {
        let trace = self.trace.as_ref()?.data();
        let is_exact = trace.is_measured() && trace.gauge == gpumem::Gauge::Exact && trace.lost == 0;
        let is_all = i128::from(trace.used.get()) == i128::from(reading.pages) - i128::from(self.pages);
        (is_exact && is_all).then(|| self.pages + trace.peak_over_start().get())
    }
}

impl Drop for OpenScope<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            lock(&self.cube.scopes).abandon();
        }
    }
}

/// Returns the scopes of a device until now, the memory in use, and the unused memory of cubecl. It waits for the
/// device.
///
/// `None` if the device is not one of cubecl, or fails.
pub fn summary(device: &Device) -> Option<Summary> {
    let cube = Cube::new(device)?;
    cube.device.sync().ok()?;
    let reading = cube.read();
    let summary = lock(&cube.scopes).summary(reading);
    Some(summary)
}

//! Reads burn's devices, and opens scopes around code.

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

/// A cubecl device.
struct Cube<'a> {
    device: &'a Device,
    client: Client,
    thread: DeviceThread,
    /// The CUDA ordinal, if this is a CUDA device.
    cuda: Option<u32>,
    scopes: Arc<Mutex<Scopes>>,
}

impl<'a> Cube<'a> {
    /// Returns the device as a cubecl device, or `None` if it belongs to another backend.
    fn new(device: &'a Device) -> Option<Self> {
        device.memory_pool_usage()?;
        // burn puts the id of the backend in the upper half. The lower half is cubecl's.
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

    /// Waits for the device and reads it. Returns `None` if that fails.
    fn point(&self) -> Option<(Reading, Reserved)> {
        self.device.sync().ok()?;
        let mut reserved = reservations::take(self.thread);
        let reading = self.read();
        // Memory that another thread reserves between these two calls may belong to either stretch, so it counts in both.
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

/// Runs `code` as a scope. Its row in [`summary`](fn@summary) contains the exact memory that the code left in use, and bounds for its peak.
///
/// This function waits for the device before and after `code`, so that all work and all frees of `code` count in the scope. While it waits,
/// the program cannot prepare further work for the device. That is the cost of a scope.
///
/// The values describe the whole device, so allocations of other threads during the scope count as well. Only one thread at a time can
/// have scopes open on a device. Meanwhile, scopes of other threads run their code without measuring it, and the summary counts them.
///
/// On CUDA, the pages that cubecl allocates from the driver during this time count for the scope with this name in `gpumem::summary()`.
pub fn scope<R>(device: &Device, name: &str, code: impl FnOnce() -> R) -> R {
    let Some(open) = Cube::new(device).and_then(|cube| OpenScope::start(cube, name)) else { return code() };
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
    fn start(cube: Cube<'a>, name: &str) -> Option<Self> {
        if !lock(&cube.scopes).is_free() {
            return None;
        }
        let Some((reading, reserved)) = cube.point() else {
            lock(&cube.scopes).count_unmeasured();
            return None;
        };
        // gpumem sees no pages if it cannot intercept the driver.
        let adopting =
            |ordinal| GpuMemTrace::builder().ctx(name).device(ordinal).adopt(Threads::named("DSD-")).silent(true);
        let trace = cube.cuda.map(adopting).and_then(|builder: GpuMemTraceBuilder| builder.start().ok());
        lock(&cube.scopes).start(name, reading, &reserved);
        Some(Self { cube, trace, pages: reading.pages, is_over: false })
    }

    fn end(mut self) {
        let Some((reading, reserved)) = self.cube.point() else { return };
        let pages_at_most = self.pages_at_most(&reading);
        lock(&self.cube.scopes).end(reading, &reserved, pages_at_most);
        self.is_over = true;
    }

    /// Returns the most memory that cubecl held from the driver during the scope, or `None` if that is not known exactly.
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

/// Returns the scopes of a device so far, the memory in use, and cubecl's unused memory. Waits for the device.
///
/// Returns `None` if the device does not belong to cubecl, or if it fails.
pub fn summary(device: &Device) -> Option<Summary> {
    let cube = Cube::new(device)?;
    cube.device.sync().ok()?;
    let reading = cube.read();
    let summary = lock(&cube.scopes).summary(reading);
    Some(summary)
}

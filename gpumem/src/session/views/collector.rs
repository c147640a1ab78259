//! The memory of a device, for metrics that are collected repeatedly.

use std::{fmt, sync::atomic::Ordering::Relaxed};

use super::statistics::InterceptedDevice;
use crate::{
    derive::Snapshot,
    error::{Kind, Result},
    inbox::LedgerView,
    ledger::PeakInterval,
    model::{Bytes, MemKind},
    report::Group,
};

/// Collects the memory of this process on a device at intervals, with the peak of each interval.
///
/// Collectors are independent of each other and of resets of other peaks. They do not query the driver.
///
/// ```
/// use gpumem::{Bytes, intercept::Collector, sim::SimGpu};
///
/// let gpu = SimGpu::install(Bytes::gib(16))?;
/// let mut collector = Collector::new(0)?;
/// drop(gpu.alloc(Bytes::mib(300))?);
/// let first = collector.collect()?;
/// assert_eq!((first.interval_peak, first.peak), (Bytes::mib(300), Bytes::mib(300)));
/// gpumem::summary_n_reset();
/// let second = collector.collect()?;
/// assert_eq!((second.interval_peak, second.peak), (Bytes::ZERO, Bytes::mib(300)));
/// # Ok::<(), gpumem::Error>(())
/// ```
pub struct Collector {
    of: InterceptedDevice,
    interval: PeakInterval,
}

/// The numbers of a [`Collector`]. The sums are taken during the call; while other threads allocate, they may belong to slightly
/// different moments.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Collected {
    /// The live bytes of each kind of memory that has had some.
    pub kinds: Vec<(MemKind, Bytes)>,
    /// The origins of the bytes that traces count, and the unused memory of registered pools. Lines are looked up on another thread,
    /// which can take a second. Until then the place is `(line not looked up yet)`.
    pub groups: Vec<Group>,
    /// The peak of the device. It does not fall when the program resets its summary.
    pub peak: Bytes,
    /// The peak since the last call, or since the collector was created.
    pub interval_peak: Bytes,
    /// The number of allocations on all devices that were rejected because there was not enough memory.
    pub rejected: u64,
    /// The number of lost events on all devices. If this is not 0, the numbers may be wrong.
    pub lost: u64,
}

impl Collector {
    /// Starts to intercept allocations, unless `GPUMEM_GAUGE` forbids exact results.
    ///
    /// # Errors
    /// Returns an error if there is no such device, or if allocations cannot be intercepted.
    pub fn new(device: impl Into<Option<u32>>) -> Result<Self> {
        let of = InterceptedDevice::on(device.into())?;
        let interval = of.session.inbox.start_interval(of.device).ok_or(Kind::Forked)?;
        Ok(Self { of, interval })
    }

    /// Returns the CUDA ordinal of the device.
    ///
    /// ```
    /// # let _gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// assert_eq!(gpumem::intercept::Collector::new(None)?.device(), 0); // the current one
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn device(&self) -> u32 {
        self.of.device.ordinal
    }

    /// Returns the UUID of the device, as `nvidia-smi -L` prints it; without `GPU-` or `MIG-` if NVML cannot be used. `None` if it has
    /// none.
    ///
    /// ```
    /// # let _gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// assert_eq!(gpumem::intercept::Collector::new(0)?.uuid(), None); // of a simulated device
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn uuid(&self) -> Option<String> {
        self.of.devices.uuid(self.device())
    }

    /// Returns the current memory of the process, and starts the next interval.
    ///
    /// # Errors
    /// Returns an error if this is the child of a fork, which has no GPU.
    pub fn collect(&mut self) -> Result<Collected> {
        let InterceptedDevice { session, device, .. } = self.of;
        let peaks = session.inbox.next_interval(&mut self.interval).ok_or(Kind::Forked)?;
        let stats = session.inbox.stats();
        let stats = stats.iter().find(|stats| stats.device == device);
        let live = Snapshot::now(&session.inbox, session, device);
        let groups = live.groups(|stack| session.stack_so_far(stack));
        session.look_up(live.stacks());
        let kinds = MemKind::ALL.into_iter().zip(stats.into_iter().flat_map(|stats| &stats.kinds));
        Ok(Collected {
            kinds: kinds
                .filter(|(_, stat)| stat.bytes.allocated > 0)
                .map(|(kind, stat)| (kind, Bytes::new(stat.bytes.current)))
                .collect(),
            groups,
            peak: Bytes::new(peaks.ever),
            interval_peak: Bytes::new(peaks.interval),
            rejected: session.rejections.count.load(Relaxed),
            lost: session.inbox.counts().lost,
        })
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.of.session.inbox.end_interval(self.interval);
    }
}

impl fmt::Debug for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collector").field("device", &self.device()).finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "sim", feature = "backtrace"))]
mod tests {
    use std::{
        thread,
        time::{Duration, Instant},
    };

    use super::*;
    use crate::session::TestSession;

    /// An async runtime's worker collects, and other tasks wait for it.
    #[test]
    fn lines_are_looked_up_on_another_thread() {
        let session = TestSession::new(&[]).unwrap();
        let gpu = session.add(Bytes::gib(1)).unwrap();
        session.run(|| {
            let mut collector = Collector::new(gpu.ordinal()).unwrap();
            let block = gpu.alloc(Bytes::mib(30)).unwrap();
            let mut collect = || collector.collect().unwrap().groups.remove(0);
            let first = collect();
            assert_eq!((first.place.as_deref(), first.library.as_deref()), (Some("(line not looked up yet)"), None));
            // Functions of this crate belong to gpumem, so no line is the program's, and the place is the test itself.
            let until = Instant::now() + Duration::from_secs(60);
            while collect().place == first.place {
                assert!(Instant::now() < until, "nothing is looked up");
                thread::sleep(Duration::from_millis(1));
            }
            assert!(collect().place.is_some_and(|place| place.starts_with("gpumem-")));
            drop(block);
        });
    }
}

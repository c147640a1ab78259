//! The highest memory of a device between two reads by one reader, such as an exporter of metrics.

use super::{meters::Meter, sums::Sums, watermark::Mark};
use crate::model::{Device, Gauge};

/// The memory in use on a device, and its peaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePeaks {
    /// The highest value since the interval started.
    pub interval: u64,
    /// The highest sum of the live blocks of the device since the session started. A reset of the summary does not lower it.
    pub ever: u64,
}

/// The interval of one reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeakInterval {
    meter: u16,
    mark: Mark,
}

impl Sums {
    /// Starts an interval.
    pub fn start_interval(&mut self, device: Device) -> PeakInterval {
        let meter = self.meters.index(device, Gauge::Exact);
        let level = &mut self.meters.0[usize::from(meter)].level;
        PeakInterval { meter, mark: level.peaks.open(level.in_use) }
    }

    /// Returns the current peaks, and starts the next interval at the same moment.
    pub fn next_interval(&mut self, interval: &mut PeakInterval) -> DevicePeaks {
        let Meter { level, peaks, .. } = &mut self.meters.0[usize::from(interval.meter)];
        let most = level.peaks.max_since(interval.mark);
        level.peaks.close(interval.mark);
        interval.mark = level.peaks.open(level.in_use);
        // The first may be below 0, because blocks that are older than the session may be freed.
        let [interval, ever] = [most, peaks.highest_record()].map(|bytes| u64::try_from(bytes).unwrap_or(0));
        DevicePeaks { interval, ever }
    }

    /// Ends an interval.
    pub fn end_interval(&mut self, interval: PeakInterval) {
        self.meters.0[usize::from(interval.meter)].level.peaks.close(interval.mark);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Ledger, *};
    use crate::model::{Block, Bytes, Event, EventKind, Family, Key, MemKind, ThreadId, Time};

    #[test]
    fn two_who_ask_see_the_peaks_of_their_own_intervals() {
        let device = Device { family: Family::Cuda, ordinal: 0 };
        let mut ledger = Ledger::default();
        let mut number = 0;
        let mut apply = |ledger: &mut Ledger, kind: EventKind| {
            number += 1;
            ledger.apply(&Event { number, time: Time::ZERO, thread: ThreadId(1), kind: &kind });
        };
        let alloc = |key, bytes| EventKind::Alloc {
            key: Key::from_raw(key),
            block: Block::new(device, Bytes::new(bytes), MemKind::Device),
        };
        let free = |key| EventKind::Free { key: Key::from_raw(key), block: None };
        apply(&mut ledger, alloc(512, 10));
        let mut often = ledger.sums().start_interval(device);
        let mut rarely = ledger.sums().start_interval(device);
        for (high, expected) in [(100, 110), (5, 15), (30, 40)] {
            apply(&mut ledger, alloc(1024, high));
            apply(&mut ledger, free(1024));
            assert_eq!(ledger.sums().next_interval(&mut often).interval, expected);
        }
        assert_eq!(ledger.sums().next_interval(&mut often), DevicePeaks { interval: 10, ever: 110 });
        ledger.sums().end_interval(often);
        apply(&mut ledger, EventKind::ResetPeaks { device });
        assert_eq!(ledger.sums().next_interval(&mut rarely), DevicePeaks { interval: 110, ever: 110 });
        apply(&mut ledger, free(512));
        assert_eq!(ledger.sums().next_interval(&mut rarely), DevicePeaks { interval: 10, ever: 110 });
        assert_eq!(ledger.sums().next_interval(&mut rarely), DevicePeaks { interval: 0, ever: 110 });
    }
}

//! The data of one recording.

use std::{collections::HashMap, io, path::PathBuf, time::Duration};

use gpumem_core::{
    derive::{LedgerView, Overlaps},
    ledger::{Counts, KnownPool},
    model::{Bytes, CallsiteId, Device, GpuMemory, MemKind, Source, StackId},
    report::{Leaks, Place, SharedNames, leak_in_words},
};
use gpumem_recording::{Definitions, End, Reader, Skipped};

use super::{
    block_lives::{BlockLife, LIVE, Lives},
    device::DeviceHistory,
    driver_blocks::DriverMemory,
    names::Origin,
    overlaps::OverlappingParts,
    recording_bytes::RecordingBytes,
    tensors::Tensors,
    time::{Moment, nanos},
};

/// The history of one recording.
#[derive(Debug)]
pub(crate) struct History {
    pub(crate) path: PathBuf,
    /// The length of the file.
    pub(crate) bytes: u64,
    /// The allocations and frees of blocks, in the order of the recording.
    pub(crate) lives: Lives,
    /// The memory that the driver took by itself.
    pub(crate) driver: DriverMemory,
    /// The origins of blocks.
    pub(crate) origins: Vec<Origin>,
    /// The labels that the program gave to blocks, by block id.
    pub(crate) labels: HashMap<u32, Box<str>>,
    /// When scopes were open, in the order of their start.
    pub(crate) scopes: Vec<ScopeLife>,
    /// The moments that the program marked, in order.
    pub(crate) marks: Vec<MarkedMoment>,
    /// The devices on which something happened. Other parts of the history refer to them by their index in this list.
    pub(crate) devices: Vec<DeviceHistory>,
    /// Allocations that the driver rejected, in order.
    pub(crate) rejections: Vec<RejectedRequest>,
    /// In a dry run, the size up to which blocks were real.
    pub(crate) real_blocks: Option<u64>,
    /// In a dry run, the values that were read without being computed, in order.
    pub(crate) unknown_values: Vec<UnknownValue>,
    /// The last moment at which the program is known to have run, since the recording started. The program may have run
    /// longer without an event.
    pub(crate) end: Duration,
    /// The data of PyTorch's tensors, if requested.
    pub(crate) tensors: Option<Tensors>,
    /// The parts of pools that overlapped others.
    pub(crate) overlapping_parts: OverlappingParts,
    /// True if the file is a snapshot of PyTorch's allocator, which contains no scopes, no threads and no other
    /// libraries.
    pub(crate) is_snapshot: bool,
    /// True if the process is still writing the recording.
    pub(crate) still_records: bool,
    pub(super) reader: Reader<RecordingBytes>,
}

/// A value that the program of a dry run read, and that was not computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnknownValue {
    /// Nanoseconds since the recording started.
    pub(crate) time: u64,
    pub(crate) bytes: u64,
    pub(crate) stack: StackId,
}

/// An allocation that the driver rejected because there was not enough memory.
#[derive(Clone, Debug)]
pub(crate) struct RejectedRequest {
    /// Nanoseconds since the recording started.
    pub(crate) time: u64,
    /// The number of the event.
    pub(crate) number: u64,
    pub(crate) bytes: u64,
    pub(crate) kind: MemKind,
    /// The index of the device in [`History::devices`], if it is known.
    pub(crate) device: Option<u16>,
    pub(crate) stack: StackId,
    /// The last change before it.
    pub(crate) after: Option<u32>,
    /// The memory that was live on the device at that moment.
    pub(crate) live: Option<u64>,
    /// The registered pools of all devices at that moment.
    pub(super) pools: Vec<KnownPool>,
    /// The reading of the device that followed the failed allocation.
    pub(crate) memory: Option<GpuMemory>,
    /// True if the same thread got at least as much within a second: on the same device, or of the same kind if the
    /// device is not known.
    pub(crate) was_obtained: bool,
}

impl RejectedRequest {
    /// Returns the device, if it is known.
    pub(crate) fn device_in(&self, history: &History) -> Option<Device> {
        Some(history.devices.get(usize::from(self.device?))?.device)
    }
}

/// A time during which a scope was open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScopeLife {
    pub(crate) callsite: CallsiteId,
    pub(crate) thread: u16,
    pub(crate) opened: u64,
    /// `None` if it is still open.
    pub(crate) closed: Option<u64>,
}

/// A moment that the program marked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MarkedMoment {
    /// The callsite that contains the name.
    pub(crate) callsite: CallsiteId,
    pub(crate) thread: u16,
    /// Nanoseconds since the recording started.
    pub(crate) time: u64,
}

impl History {
    /// Returns the last change up to a moment; `None` if the moment is before the first change.
    pub(crate) fn change_at(&self, moment: Moment) -> Option<u32> {
        match moment {
            Moment::Start => self.last_older_change(),
            Moment::Peak => self.busiest()?.peak_at,
            Moment::End => self.lives.last_change(),
            Moment::Oom => self.oom()?.after,
            Moment::Time(time) => u32::try_from(self.lives.first_after_time(nanos(time))).ok()?.checked_sub(1),
        }
    }

    /// Returns the last change before the history of a snapshot. Other recordings start with their process, or do not
    /// contain the blocks that are older.
    fn last_older_change(&self) -> Option<u32> {
        let after = self.definitions().part().filter(|_| self.is_snapshot)?.after;
        u32::try_from(self.lives.first_after_number(after)).ok()?.checked_sub(1)
    }

    /// Returns the process id, if it is known.
    pub(crate) fn pid(&self) -> Option<u32> {
        Some(self.definitions().process().pid).filter(|pid| *pid != 0)
    }

    pub(crate) fn definitions(&self) -> &Definitions {
        self.reader.definitions()
    }

    /// Returns the reader at the end of the recording, for the reports of `gpumem-core`.
    pub(crate) fn reader(&mut self) -> &mut Reader<impl io::Read + use<>> {
        &mut self.reader
    }

    pub(crate) fn ledger(&self) -> &dyn LedgerView {
        self.reader.ledger()
    }

    pub(crate) fn counts(&self) -> Counts {
        self.reader.ledger().counts()
    }

    pub(crate) fn skipped(&self) -> Skipped {
        self.reader.skipped()
    }

    /// Returns why the recording has no end.
    pub(crate) fn incomplete(&self) -> Option<String> {
        match self.reader.end() {
            Some(End::Cut { .. } | End::Complete) | None if self.still_records && self.definitions().lacks_end() => {
                Some("its process still records".to_owned())
            }
            Some(End::Cut { at }) => Some(format!("it is cut within the record at byte {at}")),
            Some(End::Damaged { at, why }) => Some(format!("it is damaged at byte {at}: {why}")),
            Some(End::AboveLimit { at, limit }) => {
                Some(format!("the data after byte {at} is not read, because gpumem never writes such a file: {limit}"))
            }
            Some(End::Complete) | None if self.definitions().lacks_end() => {
                let who = "its process still records, or could not write it, or was killed";
                Some(format!("{who}, which loses up to 0.2 seconds (1 second with --only-peak)"))
            }
            Some(End::Complete) | None => None,
        }
    }

    /// Returns whether the sum of the sizes here differs from the live bytes in the ledger. That is a bug in gpumem and
    /// is reported.
    pub(crate) fn disagrees(&self) -> bool {
        let stats = self.reader.ledger().stats();
        let current = |device: &DeviceHistory| {
            let of_device = stats.iter().find(|stats| stats.device == device.device);
            of_device.map_or(0, |stats| stats.on_device.bytes.current)
        };
        self.devices.iter().any(|device| device.live != current(device))
    }

    /// Returns the source that recorded, and the library that it used.
    pub(crate) fn sources(&self) -> Vec<(Source, &str)> {
        let mut sources: Vec<_> =
            self.definitions().interceptions().iter().map(|by| (by.source, by.library.as_str())).collect();
        sources.dedup();
        sources
    }

    /// Returns the device with the highest peak.
    pub(crate) fn busiest(&self) -> Option<&DeviceHistory> {
        let used = self.devices.iter().filter(|device| device.peak_at.is_some());
        // Among equal peaks, this returns the first device.
        used.rev().max_by_key(|device| device.peak)
    }

    /// Returns the time of a device's peak, and the time at which less was live again, in nanoseconds since the
    /// recording started.
    pub(crate) fn peak_of(&self, device: Device) -> Option<(u64, u64)> {
        let device = self.devices.iter().find(|known| known.device == device)?;
        Some((self.time_of(device.peak_at?), device.less_at.map_or(u64::MAX, |at| self.time_of(at))))
    }

    /// Returns the memory that was not freed at the end.
    pub(crate) fn leaks(&self) -> Leaks {
        // The blocks and the bytes of each origin, and the size of a block if all blocks are of the same size.
        let mut sums: Vec<(u64, u64, Option<u64>)> = vec![(0, 0, None); self.origins.len()];
        for (block, bytes) in self.live_blocks(&self.changes_at(Moment::End)) {
            let (blocks, all, each) = &mut sums[block.origin as usize];
            *each = if *blocks == 0 { Some(bytes) } else { each.filter(|each| *each == bytes) };
            (*blocks, *all) = (*blocks + 1, *all + bytes);
        }
        let live: Vec<_> = self.origins.iter().zip(sums).filter(|(_, (blocks, ..))| *blocks > 0).collect();
        let has_scopes = live.iter().any(|(origin, _)| !origin.path.is_empty());
        let names = SharedNames::of(live.iter().map(|(origin, _)| &*origin.path));
        let place = |(origin, (blocks, bytes, each)): (&Origin, (u64, u64, Option<u64>))| {
            let Origin { path, line, caller, scope_place, .. } = origin;
            // If the line is known, it is the origin, and the library is left out.
            let library = origin.library.as_deref().filter(|_| line.is_none());
            let name = leak_in_words(&names.path(path), library, line.as_deref(), scope_place.as_deref(), has_scopes);
            Place::new(name, caller.clone(), blocks, Bytes::new(bytes), each.map(Bytes::new))
        };
        let mut leaks = Leaks::at(Place::largest(live.iter().copied().map(place)));
        leaks.gone = self.counts().removed_with_context.saturating_sub(self.driver.gone_with_context);
        leaks
    }

    /// Returns the main failed allocation: the last one after which the thread did not get the memory, else the last
    /// one.
    pub(crate) fn oom(&self) -> Option<&RejectedRequest> {
        let not_obtained = self.rejections.iter().rev().find(|rejected| !rejected.was_obtained);
        not_obtained.or(self.rejections.last())
    }

    /// Returns the parts of these pools that overlap others now, or did so before they were freed.
    pub(crate) fn overlaps(&self, pools: &[KnownPool]) -> Overlaps {
        let mut overlaps = Overlaps::of(self.ledger(), pools);
        for pool in pools {
            overlaps.note(pool.pool, self.overlapping_parts.of(pool.pool));
        }
        overlaps
    }

    /// Returns the registered pools of a device at a moment. `None` if they are not known.
    pub(crate) fn pools_at(&self, moment: Moment, device: &DeviceHistory) -> Option<Vec<KnownPool>> {
        let of_device = |pools: Vec<KnownPool>| pools.into_iter().filter(|pool| pool.device == device.device).collect();
        match moment {
            Moment::Start => Some(Vec::new()),
            Moment::Peak => Some(device.pools.clone()),
            Moment::End => Some(of_device(self.reader.ledger().pools())),
            Moment::Oom => self
                .oom()
                .filter(|rejected| self.is_whole_at(rejected.number))
                .map(|rejected| of_device(rejected.pools.clone())),
            Moment::Time(_) => None,
        }
    }

    /// Returns whether the recording contains only the memory that was live at the peak of each device and at the end.
    pub(crate) fn has_only_peaks(&self) -> bool {
        self.definitions().part().is_some_and(|part| part.is_peaks)
    }

    /// Returns the first change from which the recording contains all live memory; `None` if it contains only the
    /// peaks.
    pub(crate) fn complete_from(&self) -> Option<usize> {
        match self.definitions().part() {
            Some(part) if part.is_peaks => None,
            Some(part) => Some(self.lives.first_after_number(part.after)),
            None => Some(0),
        }
    }

    /// Returns the time from which the recording contains all live memory, in nanoseconds since it started. `None` if
    /// that is its start, and for a recording of the peaks.
    pub(crate) fn known_from(&self) -> Option<u64> {
        self.definitions().part()?;
        Some(self.time_of(u32::try_from(self.complete_from()?).unwrap_or(LIVE)))
    }

    /// Returns whether the recording contains the memory that was live after a change on its device.
    pub(crate) fn is_known_after(&self, change: u32) -> bool {
        match self.complete_from() {
            Some(first) => first <= change as usize,
            None => self.devices.iter().any(|device| device.peak_at == Some(change)),
        }
    }

    /// Returns whether the recording contains the memory that was live at a moment.
    pub(crate) fn is_known_at(&self, moment: Moment) -> bool {
        match moment {
            Moment::Start => self.definitions().process().ran_before.is_none(),
            Moment::Peak | Moment::End => true,
            Moment::Oom => self.oom().is_none_or(|rejected| self.is_whole_at(rejected.number)),
            Moment::Time(time) if time >= self.end => true,
            Moment::Time(_) => match self.change_at(moment) {
                Some(change) => self.is_known_after(change) && !self.has_only_peaks(),
                None => self.definitions().part().is_none(),
            },
        }
    }

    /// Returns whether the recording contains the live memory of this kind at a known moment.
    pub(crate) fn has_kind_at(&self, kind: MemKind, moment: Moment) -> bool {
        kind.is_on_device() || self.has_besides_at(moment)
    }

    /// Returns whether the recording contains managed and pinned host memory at a known moment. A recording of the peaks
    /// does not contain it at a peak, because a peak counts only the device's memory.
    pub(crate) fn has_besides_at(&self, moment: Moment) -> bool {
        moment != Moment::Peak || !self.has_only_peaks()
    }

    /// Returns whether the recording contains the memory that was live at the event with this number.
    pub(crate) fn is_whole_at(&self, number: u64) -> bool {
        self.definitions().part().is_none_or(|part| !part.is_peaks && part.after < number)
    }

    pub(crate) fn origin(&self, block: &BlockLife) -> &Origin {
        &self.origins[block.origin as usize]
    }

    /// Returns the time of a change, in nanoseconds since the recording started.
    pub(crate) fn time_of(&self, change: u32) -> u64 {
        self.lives.time_of(change).unwrap_or_else(|| self.end_nanos())
    }

    pub(crate) fn end_nanos(&self) -> u64 {
        nanos(self.end)
    }
}

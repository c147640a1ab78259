//! Computes the sizes of PyTorch's blocks. The sizes of segments are as PyTorch logs them.
//!
//! PyTorch logs the number of bytes that the program requested. The size of the block, which
//! `torch.cuda.memory_allocated()` counts, depends on its place: PyTorch rounds up, and does not split off a remainder
//! that is too small to be useful.

use std::{
    collections::BTreeMap,
    io::{self, BufRead, Seek},
    time::Duration,
};

use gpumem_core::model::{Bytes, StackId};
use gpumem_recording::{AllocatorAction as Action, AllocatorEvent, AllocatorSettings};

use super::{
    super::ranges::remove_range,
    before::Before,
    contradictions::Contradictions,
    groups::Groups,
    history::{DeviceHistory, LoggedEvent, SegmentAbout, Segments, TorchHistory},
    passes::Stacks,
};

impl DeviceHistory {
    /// Passes on the events of this device, with the sizes of blocks. The first events stand for the memory that was
    /// live before. Returns the number of these events, and the contradictions with the memory at the end. `time`
    /// converts the time of a PyTorch event, and `stack` returns the id that its stack has in the recording. The groups
    /// of tensors and the stacks of backward passes are added where they are known.
    pub(super) fn events(
        &self,
        history: &TorchHistory,
        (groups, stacks): (&mut Groups, &mut Stacks<'_>),
        from: &mut (impl BufRead + Seek),
        time: impl Fn(u64) -> Duration,
        stack: impl Fn(u32) -> StackId,
        mut each: impl FnMut(AllocatorEvent) -> io::Result<()>,
    ) -> io::Result<(u64, Contradictions)> {
        let first = self.trace.first().unwrap_or(0);
        let Before { mut segments, blocks, pools, contradictions } = self.before(from)?;
        let mut pools = segments.values().map(|(_, about)| about.pool).chain(pools).collect::<Vec<_>>().into_iter();
        let settings = &history.settings.clone().unwrap_or_default();
        let mut groups = history.groups(self, &blocks, from, groups)?.into_iter();
        let mut add = |action, address, bytes, requested, (stream, micros, of): (u64, u64, u32)| {
            let (time, stack) = (time(micros), stack(of));
            let group = match action {
                Action::Alloc => groups.next().unwrap_or(0),
                Action::SegmentAlloc => pools.next().unwrap_or(0),
                _ => 0,
            };
            let [bytes, requested] = [bytes, requested].map(Bytes::new);
            each(AllocatorEvent { time, action, address, bytes, requested, stream, stack, group })
        };
        for (address, (bytes, about)) in &segments {
            add(Action::SegmentAlloc, *address, *bytes, *bytes, (about.stream, first, 0))?;
        }
        let mut occupied: BTreeMap<u64, u64> = blocks.iter().map(|(at, live)| (*at, live.bytes.unwrap_or(1))).collect();
        for (address, live) in &blocks {
            let bytes = live.bytes.unwrap_or_else(|| size(&segments, &occupied, settings, *address, live.requested));
            occupied.insert(*address, bytes);
            add(Action::Alloc, *address, bytes, live.requested, (0, first, live.stack))?;
            if live.is_awaiting {
                add(Action::FreeRequested, *address, 0, 0, (0, first, live.stack))?;
            }
        }
        let older = segments.len() as u64 + blocks.values().map(|live| 1 + u64::from(live.is_awaiting)).sum::<u64>();
        for piece in self.trace.pieces(from) {
            for LoggedEvent { action, is_part, address, bytes, stream, micros, stack, module: _ } in piece? {
                let is_free = matches!(action, Action::FreeRequested | Action::FreeCompleted | Action::SegmentFree);
                let about = (stream, micros, if is_free { stack } else { stacks.of_allocation(stack, micros) });
                match action {
                    Action::SegmentAlloc => {
                        segments
                            .insert(address, (bytes, SegmentAbout { is_expandable: is_part, ..Default::default() }));
                        add(action, address, bytes, bytes, about)?;
                    }
                    Action::SegmentFree => {
                        remove_range(&mut segments, address, bytes, |_, _| {});
                        add(action, address, bytes, bytes, about)?;
                    }
                    Action::Alloc => {
                        let size = size(&segments, &occupied, settings, address, bytes);
                        occupied.insert(address, size);
                        add(action, address, size, bytes, about)?;
                    }
                    Action::FreeRequested => add(action, address, 0, 0, about)?,
                    Action::FreeCompleted => {
                        occupied.remove(&address);
                        add(action, address, 0, 0, about)?;
                    }
                    Action::OutOfMemory => add(action, 0, 0, bytes, about)?,
                }
            }
        }
        Ok((older, contradictions))
    }
}

/// Returns the size of a new block. The rest of its room belongs to the block, unless PyTorch splits it off.
fn size(
    segments: &Segments,
    occupied: &BTreeMap<u64, u64>,
    settings: &AllocatorSettings,
    address: u64,
    requested: u64,
) -> u64 {
    let segment = segments.range(..=address).next_back().filter(|(start, (length, _))| address - **start < *length);
    let Some((start, (length, about))) = segment else { return settings.rounded(requested).unwrap_or(requested) };
    let end = start + length;
    let next = occupied.range(address + 1..).next().map_or(end, |(next, _)| end.min(*next));
    settings.size_in(next - address, requested, about.is_expandable)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn text(lines: &[String]) -> io::Cursor<String> {
        let head =
            [r#"{"torch": "2.11.0", "is_enabled": true, "most": 1000}"#, r#"{"settings": {"max_split_size": -1}}"#];
        let lines = head.iter().map(ToString::to_string).chain(lines.iter().cloned()).collect::<Vec<_>>();
        io::Cursor::new(lines.join("\n"))
    }

    /// Returns the events of the first device, and how many of them stand for the memory that was live before.
    fn events(lines: &[String]) -> (Vec<AllocatorEvent>, u64) {
        let mut from = text(lines);
        let history = TorchHistory::read(&mut from, true).unwrap();
        assert_eq!(history.missing, None);
        let mut events = Vec::new();
        let add = |event| {
            events.push(event);
            Ok(())
        };
        let device = &history.devices[0];
        let known = (&mut Groups::default(), &mut Stacks::new(&[], &[], &[]));
        let (older, _) = device.events(&history, known, &mut from, Duration::from_micros, StackId, add).unwrap();
        (events, older)
    }

    /// Returns the sizes of blocks, in order.
    fn sizes(lines: &[String]) -> Vec<(u64, u64)> {
        let (events, _) = events(lines);
        let allocated = events.iter().filter(|event| event.action == Action::Alloc);
        allocated.map(|event| (event.address, event.bytes.get())).collect()
    }

    fn lines(steps: &[(&str, u64, u64)], end: &[&str]) -> Vec<String> {
        let step = |(action, address, bytes): &(&str, u64, u64)| format!("[\"{action}\",{address},{bytes},0,5,0,0]");
        let head = r#"{"device": 0, "said": [1, 2, 3, 4]}"#.to_owned();
        let end = end.iter().map(ToString::to_string).chain([r#"{"end": true}"#.to_owned()]);
        [head].into_iter().chain(steps.iter().map(step)).chain(end).collect()
    }

    #[test]
    fn a_rest_that_is_not_split_off_is_part_of_a_block() {
        let base = 1 << 30;
        let steps = [
            ("segment_alloc", base, 20 * MIB),
            // The remainder is larger than 1 MiB.
            ("alloc", base, 10 * MIB + 1),
            // The remainder is 1 MiB less 512 bytes.
            ("alloc", base + 10 * MIB + 512, 9 * MIB - 511),
            ("free_requested", base, 10 * MIB + 1),
            ("free_completed", base, 10 * MIB + 1),
            // There is room for 10 MiB and 512 bytes up to the next block. A remainder of 512 bytes is too small to
            // split off.
            ("alloc", base, 10 * MIB),
        ];
        let expected = [(base, 10 * MIB + 512), (base + 10 * MIB + 512, 10 * MIB - 512), (base, 10 * MIB + 512)];
        let live = format!("[\"active_allocated\",{base},{},{},0]", 10 * MIB + 512, 10 * MIB);
        let other = format!("[\"active_allocated\",{},{},5,0]", base + 10 * MIB + 512, 10 * MIB - 512);
        let segment = format!("{{\"segment\": {base}, \"bytes\": {}, \"is_expandable\": false}}", 20 * MIB);
        assert_eq!(sizes(&lines(&steps, &[&segment, &live, &other])), expected);
    }

    #[test]
    fn what_was_live_before_the_history_is_known_from_its_end() {
        let base = 1 << 30;
        let steps = [
            // The allocation of this block is not in the history.
            ("free_requested", base, 700),
            ("free_completed", base, 700),
            ("alloc", base, 100),
            ("segment_alloc", 2 * base, 2 * MIB),
            ("segment_free", 2 * base, 2 * MIB),
            ("segment_alloc", 2 * base, 2 * MIB),
        ];
        let segment = |at: u64, stream: i64, pool: &str| {
            format!("{{\"segment\": {at}, \"bytes\": {}, \"stream\": {stream}, \"pool\": {pool}}}", 2 * MIB)
        };
        let kept = format!("[\"active_allocated\",{},{},1000,0]", base + MIB, 1024);
        let new = format!("[\"active_allocated\",{base},512,100,0]");
        let segments = [segment(base, -1, "[0, 0]"), segment(2 * base, 3, "[0, 4]")];
        let all = lines(&steps, &[&segments[0], &segments[1], &new, &kept]);
        assert_eq!(sizes(&all), [(base, 1024), (base + MIB, 1024), (base, 512)]);
        let (events, older) = events(&all);
        // One segment and two blocks.
        assert_eq!((older, events.len()), (3, 9));
        assert_eq!((events[0].bytes, events[0].stream), (Bytes::new(2 * MIB), u64::MAX));
        // PyTorch only names the pools of the segments that exist at the end.
        let segments = events.iter().filter(|event| event.action == Action::SegmentAlloc);
        let pools: Vec<_> = segments.map(|event| (event.address / base, event.group)).collect();
        assert_eq!(pools, [(1, 1), (2, 0), (2, 8)]);
    }
}

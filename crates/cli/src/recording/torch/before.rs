//! Computes the memory before the first event of a history. It goes backwards from the end, which also shows whether
//! the history contradicts itself.

use std::{
    collections::BTreeMap,
    io::{self, BufRead, Seek},
};

use gpumem_recording::AllocatorAction as Action;

use super::{
    super::ranges::remove_range,
    contradictions::Contradictions,
    history::{DeviceHistory, LiveBlock, LoggedEvent, SegmentAbout, Segments},
};

/// The state before the first event.
pub(super) struct Before {
    pub(super) segments: Segments,
    /// The live blocks.
    pub(super) blocks: BTreeMap<u64, LiveBlock>,
    /// The pool of each new segment, or 0 if the segment is freed before the end: PyTorch only names the pools of
    /// segments that exist at the end.
    pub(super) pools: Vec<u32>,
    pub(super) contradictions: Contradictions,
}

impl DeviceHistory {
    /// Adds a segment that exists at the end.
    pub(super) fn add_segment(&mut self, address: u64, bytes: u64, about: SegmentAbout) {
        let is_free = !overlaps(&self.segments, address, bytes);
        self.contradictions.check(is_free, bytes, "of a segment are at addresses of another one at the end");
        self.segments.insert(address, (bytes, about));
    }

    /// Adds a block that is in use at the end.
    pub(super) fn add_block(&mut self, address: u64, block: LiveBlock) {
        let has_room = block.bytes.is_none_or(|bytes| block.requested <= bytes);
        self.contradictions.check(has_room, block.requested, "of a tensor are in a smaller block at the end");
        self.blocks.insert(address, block);
    }

    /// Computes the state by going back from the end.
    pub(super) fn before(&self, from: &mut (impl BufRead + Seek)) -> io::Result<Before> {
        let (mut segments, mut blocks, mut pools) = (self.segments.clone(), self.blocks.clone(), Vec::new());
        let mut wrong = self.contradictions.clone();
        for piece in self.trace.pieces(from).rev() {
            for event in piece?.into_iter().rev() {
                let LoggedEvent { address, bytes, stack, is_part, stream, .. } = event;
                let block = |is_awaiting| LiveBlock { bytes: None, requested: bytes, stack, is_awaiting };
                match event.action {
                    Action::SegmentAlloc => {
                        let length = segments.get(&address).map_or(0, |(length, _)| *length);
                        let is_right = is_part || length <= bytes;
                        wrong.check(is_right, length, "of a segment had another size when it was allocated");
                        let (mut pool, mut left) = (0, bytes);
                        remove_range(&mut segments, address, bytes, |(_, about), removed| {
                            pool = about.pool;
                            left = left.saturating_sub(removed);
                        });
                        pools.push(pool);
                        wrong.check(left == 0, left, "of a segment are neither freed nor present at the end");
                        check_empty(&blocks, address, bytes, &mut wrong, "of a tensor were not allocated");
                    }
                    Action::SegmentFree => {
                        let is_gone = !overlaps(&segments, address, bytes);
                        wrong.check(is_gone, bytes, "of a segment were freed and are present afterwards");
                        check_empty(&blocks, address, bytes, &mut wrong, "of a tensor are in a segment that was freed");
                        segments.insert(address, (bytes, SegmentAbout { is_expandable: is_part, stream, pool: 0 }));
                    }
                    Action::Alloc => {
                        match blocks.remove(&address) {
                            None => wrong.add(bytes, "of a tensor are neither freed nor present at the end"),
                            Some(block) => {
                                let is_right = block.bytes.is_none_or(|end| bytes <= end);
                                wrong.check(is_right, bytes, "of a tensor have less room at the end");
                                check_freed(&block, bytes, &mut wrong);
                                wrong.check(!block.is_awaiting, bytes, "of a tensor were freed without a request");
                            }
                        }
                        let in_segment =
                            segments.range(..=address).next_back().is_some_and(|(start, (length, about))| {
                                let at = address - start;
                                at < *length && (about.is_expandable || bytes <= length - at)
                            });
                        wrong.check(in_segment, bytes, "of a tensor are in no segment");
                        let before = blocks.range(..address).next_back();
                        let is_beside = before
                            .is_none_or(|(start, block)| start.saturating_add(block.requested) <= address)
                            && blocks.range(address..address.saturating_add(bytes)).next().is_none();
                        wrong.check(is_beside, bytes, "of a tensor overlap another one");
                    }
                    Action::FreeRequested => {
                        if let Some(known) = blocks.get_mut(&address) {
                            wrong.check(known.is_awaiting, bytes, "of a tensor were freed and are present afterwards");
                            check_freed(known, bytes, &mut wrong);
                            // The allocation is compared with this free.
                            known.requested = if known.bytes.is_none() { bytes } else { known.requested };
                            known.is_awaiting = false;
                        } else {
                            wrong.add(bytes, "of a tensor were freed, but never completely");
                            blocks.insert(address, block(false));
                        }
                    }
                    Action::FreeCompleted => {
                        let known = blocks.insert(address, block(true));
                        wrong.check(known.is_none(), bytes, "of a tensor were freed and are present afterwards");
                    }
                    Action::OutOfMemory => {}
                }
            }
        }
        pools.reverse();
        Ok(Before { segments, blocks, pools, contradictions: wrong })
    }
}

/// Returns whether a part of a range belongs to a segment.
fn overlaps(segments: &Segments, address: u64, bytes: u64) -> bool {
    let before = segments.range(..address.saturating_add(bytes)).next_back();
    before.is_some_and(|(start, (length, _))| start.saturating_add(*length) > address)
}

/// Notes a contradiction if there is a block in a range that must be empty.
fn check_empty(
    blocks: &BTreeMap<u64, LiveBlock>,
    address: u64,
    bytes: u64,
    wrong: &mut Contradictions,
    what: &'static str,
) {
    if let Some((_, block)) = blocks.range(address..address.saturating_add(bytes)).next() {
        wrong.add(block.requested, what);
    }
}

/// Notes a contradiction if a later free of the block has another size. A block at the end was not freed.
fn check_freed(block: &LiveBlock, bytes: u64, wrong: &mut Contradictions) {
    let is_right = block.bytes.is_some() || block.requested == bytes;
    wrong.check(is_right, bytes, "of a tensor were freed with another size");
}

#[cfg(test)]
mod tests {
    use super::{super::history::TorchHistory, *};

    const MIB: u64 = 1 << 20;

    /// Returns how the history contradicts itself. Each line is an event, a segment or a live block: its name, and its
    /// address and bytes in MiB.
    fn contradiction(lines: &str) -> Option<String> {
        let mut text = "{\"torch\": \"2.11.0\"}\n{\"device\": 0}\n".to_owned();
        for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let mut words = line.split(' ');
            let name = words.next().unwrap();
            let [address, bytes] = [(); 2].map(|()| words.next().unwrap().parse::<u64>().unwrap() * MIB);
            let line = match name {
                "segment" => format!("{{\"segment\": {address}, \"bytes\": {bytes}}}\n"),
                "active_allocated" | "active_awaiting_free" => format!("[\"{name}\",{address},{bytes},{bytes},0]\n"),
                _ => format!("[\"{name}\",{address},{bytes},0,5,0,0]\n"),
            };
            text.push_str(&line);
        }
        text += "{\"end\": true}\n";
        let mut from = io::Cursor::new(text);
        let history = TorchHistory::read(&mut from, true).unwrap();
        history.devices[0].before(&mut from).unwrap().contradictions.in_words()
    }

    /// One segment that stays with a tensor, and one that is freed.
    const RIGHT: &str = "segment_alloc 100 20
alloc 100 8
alloc 108 4
segment_alloc 200 40
alloc 200 40
free_requested 200 40
free_completed 200 40
segment_free 200 40
free_requested 108 4
free_completed 108 4
segment 100 20
active_allocated 100 8";

    #[test]
    fn a_history_leads_to_the_memory_at_its_end() {
        assert_eq!(contradiction(RIGHT), None);
        for skipped in 0..10 {
            let later: Vec<_> = RIGHT.lines().skip(skipped).collect();
            assert_eq!(contradiction(&later.join("\n")), None, "from {skipped}");
        }
        let end = "segment 100 20\nactive_allocated 100 8";
        for (line, by, what) in [
            ("segment_free 200 40", "", "40 MiB of a segment are neither freed nor present at the end, and 1 more"),
            ("\nalloc 100 8", "", "8 MiB of a tensor were not allocated"),
            ("\nalloc 200 40", "", "40 MiB of a tensor were not allocated"),
            ("free_requested 108 4", "", "4 MiB of a tensor were freed without a request"),
            ("free_completed 108 4", "", "4 MiB of a tensor were freed, but never completely"),
            (
                "free_requested 108 4\nfree_completed 108 4",
                "",
                "4 MiB of a tensor are neither freed nor present at the end",
            ),
            (
                "free_requested 200 40\nfree_completed 200 40",
                "",
                "40 MiB of a tensor are neither freed nor present at the end",
            ),
            (
                "free_completed 200 40",
                "free_completed 200 40\nfree_requested 200 40\nfree_completed 200 40",
                "40 MiB of a tensor were freed and are present afterwards",
            ),
            (
                "segment_alloc 200 40",
                "segment_alloc 200 40\nsegment_alloc 200 40",
                "40 MiB of a segment are neither freed nor present at the end",
            ),
            ("\nalloc 108 4", "\nalloc 108 4\nalloc 104 1", "1 MiB of a tensor overlap another one, and 1 more"),
            (end, "", "20 MiB of a segment are neither freed nor present at the end, and 3 more"),
            (
                end,
                "segment 100 20\nsegment 100 20\nactive_allocated 100 8",
                "20 MiB of a segment are at addresses of another one at the end",
            ),
            (
                end,
                "segment 100 10\nactive_allocated 100 8",
                "10 MiB of a segment are neither freed nor present at the end, and 1 more",
            ),
            (
                end,
                "segment 100 30\nactive_allocated 100 8",
                "30 MiB of a segment had another size when it was allocated",
            ),
            ("free_completed 200 40", "free_completed 200 30", "40 MiB of a tensor were freed with another size"),
            (
                "free_requested 108 4\nfree_completed 108 4",
                "free_requested 108 3\nfree_completed 108 3",
                "4 MiB of a tensor were freed with another size",
            ),
            (end, "segment 100 20\nactive_allocated 100 6", "8 MiB of a tensor have less room at the end"),
            (end, &format!("segment_free 110 10\n{end}"), "10 MiB of a segment were freed and are present afterwards"),
            (
                end,
                &format!("segment_free 100 8\n{end}"),
                "12 MiB of a segment are neither freed nor present at the end, and 3 more",
            ),
        ] {
            assert!(RIGHT.contains(line));
            assert_eq!(contradiction(&RIGHT.replacen(line, by, 1)).as_deref(), Some(what), "{line} -> {by}");
        }
    }

    #[test]
    fn parts_of_expandable_segments_come_and_go() {
        let right = "segment_map 100 20
            segment_map 120 20
            alloc 110 25
            free_requested 110 25
            free_completed 110 25
            segment_unmap 110 20
            segment 100 10
            segment 130 10";
        assert_eq!(contradiction(right), None);
        let wrong = right.replace("segment 130 10", "segment 130 8");
        assert_eq!(
            contradiction(&wrong).as_deref(),
            Some("2 MiB of a segment are neither freed nor present at the end")
        );
    }
}

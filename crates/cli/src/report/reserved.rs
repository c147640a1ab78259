//! The parts of the memory that PyTorch holds from the driver, and why some of it is unused.

use std::{
    cmp::Reverse,
    collections::HashMap,
    io::{self, Write},
};

use gpumem_core::{
    export::{Amounts, Paint, Role},
    model::Bytes,
    report::counted,
};
use gpumem_recording::TensorClass;
use serde::Serialize;

use super::{place_sums::NO_LINE, text::percent};
use crate::history::{
    Origin,
    tensors::{AllocatorState, Piece, Segment, SegmentUse, Tensor, TensorHistory, Tensors},
};

/// Unused memory is explained if it is at least 1 / 20 of all.
const MATTERS: u64 = 20;
/// At most this many of the lines that keep segments are printed; JSON contains all. The second number is for a report
/// that also contains tables of modules.
const MOST_KEEPERS: [usize; 2] = [4, 2];
/// At most this many segments are drawn; JSON contains all.
const MOST_SEGMENTS: usize = 10;
/// A segment is drawn with at most this many columns.
const MOST_COLUMNS: u64 = 60;
/// PyTorch uses segments of this size for requests of up to half of it, and for no others.
const SMALL_SEGMENT: u64 = 2 << 20;
/// From this number on, partly unused segments are called many.
const MANY: u64 = 4;

/// The memory that PyTorch holds from the driver at one moment. The `requested_bytes` of the moment, and the fields
/// from `rounding_bytes` to `unused_in_private_pools_bytes`, add up to `reserved_bytes` and `outside_segments_bytes`.
/// The field names are those in JSON.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct AllocatorSums {
    /// The bytes of all segments.
    pub(crate) reserved_bytes: u64,
    /// The bytes that tensors take in addition to the bytes that the program requested.
    pub(crate) rounding_bytes: u64,
    /// The bytes of tensors that the program has freed, but that work on another stream may still use.
    pub(crate) awaiting_bytes: u64,
    /// The unused bytes in segments with tensors. This field and the next one are about the stream of the latest
    /// request, outside of private pools.
    pub(crate) unused_beside_tensors_bytes: u64,
    /// The bytes of segments without tensors.
    pub(crate) unused_segments_bytes: u64,
    /// The unused bytes of segments that PyTorch keeps for other streams.
    pub(crate) unused_of_other_streams_bytes: u64,
    /// The unused bytes of private pools, such as those of captured graphs.
    pub(crate) unused_in_private_pools_bytes: u64,
    /// The unused bytes in segments whose pool is not known: PyTorch only names the pools of the segments that exist at
    /// the end.
    pub(crate) unused_in_unknown_pools_bytes: u64,
    /// The bytes of tensors that are in no segment, or that overlap other tensors. If this is not 0, the file
    /// contradicts itself.
    pub(crate) outside_segments_bytes: u64,
    /// The number of unused pieces that the stream of the latest request can get. Private pools are left out.
    pub(crate) unused_pieces: u64,
    /// The largest request that fits into such a piece.
    pub(crate) largest_fit_bytes: u64,
    /// The lines whose tensors keep partly unused segments, the most bytes first.
    pub(crate) kept_by: Vec<Keeper>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) segments: Option<Vec<SegmentContent>>,
    /// The number of segments that contain both tensors and unused room, outside of private pools.
    #[serde(skip)]
    partly_used: u64,
    #[serde(skip)]
    is_expandable: bool,
    #[serde(skip)]
    has_private_pools: bool,
}

/// Tensors of one line that keep partly unused segments.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Keeper {
    pub(crate) line: Option<String>,
    pub(crate) caller: Option<String>,
    pub(crate) class: Option<&'static str>,
    /// Their module, if it is the same for all.
    pub(crate) module: Option<String>,
    pub(crate) bytes: u64,
    pub(crate) tensors: u64,
    pub(crate) segments: u64,
    /// The unused bytes of these segments, which tensors of other lines may keep as well.
    pub(crate) unused_bytes: u64,
    /// True if each segment contains the same number of their bytes.
    #[serde(skip)]
    is_even: bool,
}

/// A segment at one moment, for JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SegmentContent {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) stream: u64,
    /// The id of the pool: 0 for the pool that the whole program shares, else the id of a private pool. `None` if it is
    /// not known.
    pub(crate) pool: Option<u16>,
    pub(crate) used_bytes: u64,
    pub(crate) blocks: Vec<SegmentBlock>,
}

/// A tensor in a segment. The room between two of them is unused.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SegmentBlock {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) requested_bytes: u64,
    /// True if the program has freed it, but work on another stream may still use it.
    pub(crate) is_awaiting: bool,
    pub(crate) line: Option<String>,
    pub(crate) caller: Option<String>,
    pub(crate) module: Option<String>,
    pub(crate) class: Option<&'static str>,
}

/// Tensors with the same line, caller and class are one keeper.
type Key<'a> = (Option<&'a str>, Option<&'a str>, Option<TensorClass>);

/// The tensors of a keeper, in one segment or in several.
struct Kept<'a> {
    bytes: u64,
    tensors: u64,
    /// `None` if they have several.
    module: Option<&'a str>,
    segments: u64,
    unused: u64,
    /// The bytes in each segment, if they are equal.
    each: Option<u64>,
}

/// The origin and the class of a tensor, as far as they are known.
fn known<'a>(tensors: &'a Tensors, tensor: &Tensor) -> (Option<&'a Origin>, Option<TensorClass>) {
    let at = tensor.origin as usize;
    (tensors.origins.get(at), tensors.classes.as_ref().and_then(|classes| *classes.get(at)?))
}

impl AllocatorSums {
    /// Returns the sums of `state`, the device's memory after this many steps. With `has_segments`, each segment is
    /// listed.
    pub(super) fn of(
        tensors: &Tensors,
        device: &TensorHistory,
        steps: usize,
        state: &AllocatorState,
        has_segments: bool,
    ) -> Self {
        let (is_expandable, stream) = (device.is_expandable, device.request_stream(steps, state));
        let mut all = Self { is_expandable, ..Self::default() };
        let mut keepers: HashMap<Key<'_>, Kept<'_>> = HashMap::new();
        let (mut inside, mut listed) = (0, Vec::new());
        // A part of an expandable segment that contains no tensor can be returned, as a segment can.
        for segment in state.segments(false) {
            let used = used_in(&state.pieces(&segment));
            inside += used;
            all.add(&segment, used, stream);
        }
        for segment in state.segments(is_expandable) {
            let pieces = state.pieces(&segment);
            let used = used_in(&pieces);
            if !segment.of.is_private() && segment.of.stream == stream {
                all.add_pieces(&segment, &pieces);
            }
            if used > 0 && used < segment.bytes && !segment.of.is_private() {
                all.partly_used += 1;
                keep(&mut keepers, tensors, &pieces, segment.bytes - used);
            }
            if has_segments {
                listed.push(SegmentContent::of(tensors, &segment, &pieces, used));
            }
        }
        for tensor in state.tensors.values() {
            if tensor.is_awaiting {
                all.awaiting_bytes += tensor.bytes;
            } else {
                all.rounding_bytes += tensor.bytes - tensor.requested;
            }
        }
        all.outside_segments_bytes = state.tensors.values().map(|tensor| tensor.bytes).sum::<u64>() - inside;
        all.kept_by = keepers.into_iter().map(Keeper::of).collect();
        all.kept_by.sort_by(|a, b| {
            let order = |keeper: &Keeper| (Reverse(keeper.unused_bytes), keeper.bytes);
            order(a).cmp(&order(b)).then_with(|| (&a.line, &a.caller, a.class).cmp(&(&b.line, &b.caller, b.class)))
        });
        all.segments = has_segments.then_some(listed);
        all
    }

    /// Adds a segment with this number of used bytes.
    fn add(&mut self, segment: &Segment, used: u64, stream: u64) {
        let Segment { bytes, of: SegmentUse { stream: of, pool }, .. } = *segment;
        let unused = bytes - used;
        self.reserved_bytes += bytes;
        self.has_private_pools |= segment.of.is_private();
        let sum = match used {
            _ if segment.of.is_private() => &mut self.unused_in_private_pools_bytes,
            _ if of != stream => &mut self.unused_of_other_streams_bytes,
            0 => &mut self.unused_segments_bytes,
            _ => &mut self.unused_beside_tensors_bytes,
        };
        *sum += unused;
        if pool == 0 {
            self.unused_in_unknown_pools_bytes += unused;
        }
    }

    /// Adds the unused pieces of a segment that belongs to the stream of the latest request.
    fn add_pieces(&mut self, segment: &Segment, pieces: &[Piece<'_>]) {
        let most = if segment.bytes == SMALL_SEGMENT { SMALL_SEGMENT / 2 } else { u64::MAX };
        for piece in pieces.iter().filter(|piece| piece.tensor.is_none()) {
            self.unused_pieces += 1;
            self.largest_fit_bytes = self.largest_fit_bytes.max(piece.bytes.min(most));
        }
    }

    /// Returns the bytes that no tensor uses.
    fn unused(&self) -> u64 {
        self.unused_beside_tensors_bytes
            + self.unused_segments_bytes
            + self.unused_of_other_streams_bytes
            + self.unused_in_private_pools_bytes
    }

    /// Returns text such as `400 MiB from the driver: asked for 305 MiB (76 %), unused next to tensors 50 MiB (12 %),
    /// unused segments 45 MiB (11 %)`.
    pub(super) fn in_words(&self, requested: u64, unit: Amounts) -> String {
        let parts = [
            ("asked for", requested),
            ("rounding", self.rounding_bytes),
            ("freed, in use by another stream,", self.awaiting_bytes),
            ("unused next to tensors", self.unused_beside_tensors_bytes),
            ("unused segments", self.unused_segments_bytes),
            ("unused of other streams", self.unused_of_other_streams_bytes),
            ("unused in private pools of graphs", self.unused_in_private_pools_bytes),
        ];
        // If the file contradicts itself, the sum is larger than the segments.
        let whole = parts.iter().map(|(_, bytes)| bytes).sum();
        let share = |bytes| percent(Bytes::new(bytes).signed(), whole);
        let in_words = |bytes| unit.in_words(Bytes::new(bytes).signed());
        let words: Vec<_> = parts
            .iter()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(name, bytes)| format!("{name} {} ({})", in_words(*bytes), share(*bytes)))
            .collect();
        let nothing = if words.is_empty() { "nothing".to_owned() } else { words.join(", ") };
        format!("{} from the driver: {nothing}", in_words(self.reserved_bytes))
    }

    /// Returns why a part is unused, each reason as a line with its name. Empty if little is unused.
    pub(super) fn reasons(&self, has_modules: bool, unit: Amounts) -> Vec<(&'static str, String)> {
        let mut lines = Vec::new();
        if self.unused() == 0 || self.unused().saturating_mul(MATTERS) < self.reserved_bytes {
            return lines;
        }
        let in_words = |bytes: u64| unit.in_words(Bytes::new(bytes).signed());
        if self.unused_pieces > 0 {
            let unused = in_words(self.unused_beside_tensors_bytes + self.unused_segments_bytes);
            let (fit, pieces) = (in_words(self.largest_fit_bytes), counted(self.unused_pieces, "piece", "pieces"));
            let text = format!("a request of at most {fit} without a new segment: {unused} are unused, in {pieces}");
            lines.push(("fits", text));
        }
        if self.has_private_pools && self.unused_in_unknown_pools_bytes > 0 {
            let bytes = in_words(self.unused_in_unknown_pools_bytes);
            let why =
                "may be in private pools: their segments were freed before the end, where PyTorch names the pools";
            lines.push(("not known", format!("{bytes} of it {why}")));
        }
        // Parts of expandable segments can be returned one by one.
        if self.is_expandable {
            return lines;
        }
        let shown = self.kept_by.iter().filter(|keeper| keeper.unused_bytes * MATTERS >= self.unused());
        lines.extend(
            shown.take(MOST_KEEPERS[usize::from(has_modules)]).map(|keeper| ("kept by", keeper.in_words(unit))),
        );
        let kept: u64 = self.kept_by.iter().map(|keeper| keeper.unused_bytes).sum();
        if let ([.., ("kept by", _), (_, last)], true) = (&mut *lines, kept > self.unused_beside_tensors_bytes) {
            *last += "; some segments are kept by several lines";
        }
        if self.partly_used >= MANY && self.unused_beside_tensors_bytes * MATTERS >= self.reserved_bytes {
            let advice =
                "`gpumem what-if` with this file shows the effect of PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";
            lines.push(("advice", advice.to_owned()));
        }
        lines
    }

    /// Draws the largest segments with unused room.
    pub(super) fn write_segments(&self, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
        let has_room = |segment: &&SegmentContent| segment.used_bytes < segment.bytes;
        let mut largest: Vec<_> = self.segments.iter().flatten().filter(has_room).collect();
        largest.sort_by_key(|segment| Reverse(segment.bytes));
        let count = largest.len();
        largest.truncate(MOST_SEGMENTS);
        let Some(most) = largest.first().map(|segment| segment.bytes.max(1)) else { return Ok(()) };
        let which =
            if count > largest.len() { format!("the largest {} of {count}", largest.len()) } else { "all".to_owned() };
        let text = format!("{which} with unused room (█ used, ▒ partly, · unused)");
        writeln!(out, "{}{text}", paint.on(Role::Faint, format!("{:<9}", "segments")))?;
        let columns = (paint.width().saturating_sub(26) as u64).clamp(1, MOST_COLUMNS);
        for segment in largest {
            let columns = share_of(segment.bytes, most, columns).max(1);
            let size = Bytes::new(segment.bytes).to_string();
            writeln!(out, " {:012x} {size:>11} {}", segment.address, paint.on(Role::Bar, segment.bar(columns)))?;
        }
        Ok(())
    }
}

/// Returns the bytes of tensors.
fn used_in(pieces: &[Piece<'_>]) -> u64 {
    pieces.iter().filter(|piece| piece.tensor.is_some()).map(|piece| piece.bytes).sum()
}

/// Scales `part` of `whole` to `of`.
fn share_of(part: u64, whole: u64, of: u64) -> u64 {
    let share = u128::from(part) * u128::from(of) / u128::from(whole.max(1));
    u64::try_from(share).unwrap_or(u64::MAX)
}

/// Adds the tensors of a segment with this many unused bytes to the keepers.
fn keep<'a>(keepers: &mut HashMap<Key<'a>, Kept<'a>>, tensors: &'a Tensors, pieces: &[Piece<'_>], unused: u64) {
    let mut here: HashMap<Key<'_>, Kept<'_>> = HashMap::new();
    for tensor in pieces.iter().filter_map(|piece| piece.tensor) {
        let (origin, class) = known(tensors, tensor);
        let line = origin.and_then(|origin| origin.line.as_deref());
        let caller = origin.and_then(|origin| origin.caller.as_deref());
        let module = origin.and_then(|origin| origin.path.first()).map(String::as_str);
        let none = Kept { bytes: 0, tensors: 0, module, segments: 1, unused, each: None };
        let kept = here.entry((line, caller, class)).or_insert(none);
        kept.bytes += tensor.bytes;
        kept.tensors += 1;
        kept.module = kept.module.filter(|known| module == Some(known));
    }
    for (key, kept) in here {
        let each = Some(kept.bytes);
        keepers
            .entry(key)
            .and_modify(|sum| {
                sum.bytes += kept.bytes;
                sum.tensors += kept.tensors;
                sum.segments += 1;
                sum.unused += kept.unused;
                sum.module = sum.module.filter(|known| kept.module == Some(known));
                sum.each = sum.each.filter(|bytes| *bytes == kept.bytes);
            })
            .or_insert(Kept { each, ..kept });
    }
}

impl Keeper {
    fn of(((line, caller, class), kept): (Key<'_>, Kept<'_>)) -> Self {
        let Kept { bytes, tensors, module, segments, unused, each } = kept;
        let [line, caller, module] = [line, caller, module].map(|text| text.map(str::to_owned));
        let class = class.map(TensorClass::name);
        Self { line, caller, class, module, bytes, tensors, segments, unused_bytes: unused, is_even: each.is_some() }
    }

    /// Returns text such as `train.py:31 (optimizer) holds 2 MiB in each of 14 segments: 280 MiB cannot be returned`.
    fn in_words(&self, unit: Amounts) -> String {
        let in_words = |bytes: u64| unit.in_words(Bytes::new(bytes).signed());
        let names: Vec<_> = self.class.into_iter().chain(self.module.as_deref()).collect();
        let names = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
        let (line, unused) = (self.line.as_deref().unwrap_or(NO_LINE), in_words(self.unused_bytes));
        let held = match self.segments {
            1 => format!("{} in a segment", in_words(self.bytes)),
            count if self.is_even => format!("{} in each of {count} segments", in_words(self.bytes / count)),
            count => format!("{} in {count} segments", in_words(self.bytes)),
        };
        format!("{line}{names} holds {held}: {unused} cannot be returned")
    }
}

impl SegmentContent {
    fn of(tensors: &Tensors, segment: &Segment, pieces: &[Piece<'_>], used_bytes: u64) -> Self {
        let block = |piece: &Piece<'_>| {
            let tensor = piece.tensor?;
            let (origin, class) = known(tensors, tensor);
            Some(SegmentBlock {
                address: piece.address,
                bytes: piece.bytes,
                requested_bytes: tensor.requested,
                is_awaiting: tensor.is_awaiting,
                line: origin.and_then(|origin| origin.line.clone()),
                caller: origin.and_then(|origin| origin.caller.clone()),
                module: origin.and_then(|origin| origin.path.first().cloned()),
                class: class.map(TensorClass::name),
            })
        };
        let Segment { address, bytes, of: SegmentUse { stream, pool } } = *segment;
        let blocks = pieces.iter().filter_map(block).collect();
        Self { address, bytes, stream, pool: pool.checked_sub(1), used_bytes, blocks }
    }

    /// Returns a bar that marks the used parts.
    fn bar(&self, columns: u64) -> String {
        let mut used: Vec<(u64, u64)> = (0..columns).map(|column| (column, 0)).collect();
        let edge = |column: u64| self.address + share_of(column, columns, self.bytes);
        for block in &self.blocks {
            let end = block.address + block.bytes;
            let first = share_of(block.address - self.address, self.bytes, columns);
            let part = used.iter_mut().skip_while(|(column, _)| *column < first);
            for (column, used) in part.take_while(|(column, _)| edge(*column) < end) {
                *used += edge(*column + 1).min(end).saturating_sub(edge(*column).max(block.address));
            }
        }
        let sign = |(column, used): (u64, u64)| match used {
            0 => '·',
            used if used == edge(column + 1) - edge(column) => '█',
            _ => '▒',
        };
        used.into_iter().map(sign).collect()
    }
}

#[cfg(test)]
mod tests {
    use gpumem_core::model::{Device, Family, MemKind};
    use gpumem_recording::{AllocatorAction as Action, AllocatorDevice};

    use super::*;
    use crate::history::tensors::AllocatorStep;

    const MIB: u64 = 1 << 20;

    /// The unit of a table in MiB.
    fn mib() -> Amounts {
        Amounts::of([1 << 20])
    }

    /// Returns the memory after some steps. A step consists of an action, an address and a size in MiB, a stream, and
    /// the origin of a tensor or the pool of a segment.
    fn reserved(is_expandable: bool, steps: &[(Action, u64, u64, u64, u16)]) -> (AllocatorSums, u64) {
        let step = |&(action, address, bytes, stream, of): &(Action, u64, u64, u64, u16)| AllocatorStep {
            time: 1,
            action,
            address: address * MIB,
            bytes: bytes * MIB,
            requested: bytes * MIB - if action == Action::Alloc { 100 } else { 0 },
            stream,
            origin: of.into(),
            pool: of,
        };
        let device = Device { family: Family::Cuda, ordinal: 0 };
        let about = AllocatorDevice { device, older: 0, known_from: None, reported: None };
        let steps = steps.iter().map(step).collect();
        let history = TensorHistory::new(about, steps, is_expandable);
        let origin = |line: &str, module: &str| {
            let path = vec![module.to_owned()];
            Origin { line: Some(line.to_owned()), path, ..Origin::unnamed(MemKind::Device) }
        };
        let tensors = Tensors {
            origins: vec![origin("a.py:1", "Net.a"), origin("a.py:1", "Net.b"), origin("b.py:2", "Net.b")],
            classes: Some([TensorClass::Weights, TensorClass::Weights, TensorClass::Inputs].map(Some).to_vec()),
            ..Tensors::default()
        };
        let state = history.state(usize::MAX);
        let all = AllocatorSums::of(&tensors, &history, usize::MAX, &state, true);
        let requested = state.tensors.values().filter(|tensor| !tensor.is_awaiting).map(|tensor| tensor.requested);
        let requested = requested.sum();
        let sum = requested + all.rounding_bytes + all.awaiting_bytes + all.unused();
        assert_eq!(sum, all.reserved_bytes + all.outside_segments_bytes, "{all:?}");
        (all, requested)
    }

    use Action::{Alloc, FreeRequested, OutOfMemory, SegmentAlloc, SegmentFree};

    #[test]
    fn each_byte_is_in_one_row() {
        let steps = [
            // Two segments are kept by one line, and one of them by another line too.
            (SegmentAlloc, 100, 20, 0, 1),
            (SegmentAlloc, 120, 20, 0, 1),
            (Alloc, 104, 2, 0, 0),
            (Alloc, 120, 2, 0, 1),
            (Alloc, 130, 3, 0, 2),
            // One contains no tensor, one contains a tensor that another stream still needs, and one is for small
            // requests.
            (SegmentAlloc, 200, 30, 0, 0),
            (SegmentAlloc, 300, 40, 0, 1),
            (Alloc, 300, 40, 0, 0),
            (FreeRequested, 300, 0, 0, 0),
            (SegmentAlloc, 400, 2, 0, 1),
            // One belongs to another stream, and one to a captured graph.
            (SegmentAlloc, 500, 50, 7, 1),
            (Alloc, 500, 10, 7, 0),
            (SegmentAlloc, 600, 60, 0, 3),
            (Alloc, 600, 1, 0, 0),
            (OutOfMemory, 0, 0, 0, 0),
        ];
        let (all, requested) = reserved(false, &steps);
        let sums = [
            all.awaiting_bytes,
            all.unused_beside_tensors_bytes,
            all.unused_segments_bytes,
            all.unused_of_other_streams_bytes,
            all.unused_in_private_pools_bytes,
            all.unused_in_unknown_pools_bytes,
            all.largest_fit_bytes,
        ];
        assert_eq!(sums.map(|bytes| bytes / MIB), [40, 33, 32, 40, 59, 30, 30]);
        assert_eq!((all.rounding_bytes, all.unused_pieces, all.outside_segments_bytes), (500, 6, 0));
        let first = "222 MiB from the driver: asked for 18.00 MiB (8 %), rounding 500 B (<1 %), freed, in use by another stream, 40 MiB (18 %), ";
        let words = all.in_words(requested, mib());
        assert!(
            words.starts_with(first) && words.ends_with("unused in private pools of graphs 59 MiB (27 %)"),
            "{words}"
        );
        let kept: Vec<_> = all.kept_by.iter().map(|keeper| keeper.in_words(mib())).collect();
        assert_eq!(
            kept,
            [
                "a.py:1 (weights) holds 14 MiB in 3 segments: 73 MiB cannot be returned",
                "b.py:2 (inputs, Net.b) holds 3 MiB in a segment: 15 MiB cannot be returned",
            ]
        );
        let reasons = all.reasons(false, mib());
        let prefixes =
            ["a request of at most 30 MiB without a new segment: 65 MiB are unused, in 6 pieces", "30 MiB of it may"];
        assert!(prefixes.iter().zip(&reasons).all(|(prefix, (_, text))| text.starts_with(prefix)), "{reasons:?}");
        assert_eq!(reasons.len(), 4, "three segments are not many: {reasons:?}");
        // A request of another stream gets other memory.
        let (other, _) = reserved(false, &[&steps[..14], &[(OutOfMemory, 0, 0, 7, 0)]].concat());
        assert_eq!((other.largest_fit_bytes, other.unused_of_other_streams_bytes), (40 * MIB, 65 * MIB));
        // A tensor that is older than the history has the stream of its segment.
        let (older, _) = reserved(false, &[(SegmentAlloc, 500, 50, 7, 1), (Alloc, 500, 10, 0, 0)]);
        assert_eq!((older.largest_fit_bytes, older.unused_of_other_streams_bytes), (40 * MIB, 0));
        assert_eq!(reserved(false, &[(SegmentAlloc, 400, 2, 0, 1)]).0.largest_fit_bytes, MIB);
    }

    #[test]
    fn expandable_segments_are_advised_where_they_help() {
        let segments = (1..=4).flat_map(|at| [(SegmentAlloc, at * 20, 20, 0, 1), (Alloc, at * 20 + 2, 1, 0, 0)]);
        let steps: Vec<_> = segments.collect();
        let (all, _) = reserved(false, &steps);
        let [.., (_, kept), (name, advice)] = &*all.reasons(false, mib()) else { panic!() };
        assert_eq!(kept, "a.py:1 (weights, Net.a) holds 1 MiB in each of 4 segments: 76 MiB cannot be returned");
        assert!(*name == "advice" && advice.contains(" PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"));
        assert_eq!(reserved(false, &steps[..6]).0.reasons(false, mib()).len(), 2, "three are not many");
        // In that case, they are one segment, with gaps of up to 20 MiB between the tensors.
        let (all, _) = reserved(true, &steps);
        assert_eq!((all.segments.as_ref().unwrap().len(), all.largest_fit_bytes), (1, 19 * MIB));
        assert_eq!(all.reasons(false, mib()).len(), 1, "{:?}", all.reasons(false, mib()));
        let (all, _) = reserved(true, &[&steps[..], &[(SegmentAlloc, 100, 30, 0, 1)]].concat());
        assert_eq!((all.unused_segments_bytes, all.largest_fit_bytes), (30 * MIB, 47 * MIB));
        assert_eq!(reserved(true, &[&steps[..], &[(SegmentFree, 44, 10, 0, 0)]].concat()).0.segments.unwrap().len(), 2);
        // A small unused part is not explained.
        assert_eq!(reserved(false, &[(SegmentAlloc, 0, 20, 0, 1), (Alloc, 0, 20, 0, 0)]).0.reasons(false, mib()), []);
    }
}

//! What the memory consists of that PyTorch has from the driver, and why a part of it is of no use.

use std::{
    cmp::Reverse,
    collections::HashMap,
    io::{self, Write},
};

use gpumem_core::{
    export::{Paint, Role},
    model::Bytes,
    recording::TensorClass,
    report::counted,
};
use serde::Serialize;

use super::{tensors::NO_LINE, text::percent};
use crate::history::{
    Origin,
    tensors::{AllocatorState, Piece, Segment, SegmentUse, Tensor, TensorHistory, Tensors},
};

/// What is unused is explained if it is at least one part in this many.
const MATTERS: u64 = 20;
/// At most this many lines are printed that keep segments; JSON has all.
const MOST_HOLDERS: usize = 4;
/// At most this many segments are drawn; JSON has all.
const MOST_SEGMENTS: usize = 10;
/// The most columns of a segment.
const MOST_COLUMNS: usize = 60;
/// PyTorch has segments of this size for requests of at most half of it, and for no others.
const SMALL_SEGMENT: u64 = 2 << 20;
/// So many segments of which a part is unused are many.
const MANY: u64 = 4;

/// What PyTorch has from the driver at one moment. `requested_bytes` of the moment, and the figures from `rounding_bytes` to
/// `unused_in_private_pools_bytes`, add up to `reserved_bytes` and `outside_segments_bytes`. The names of the fields are those in JSON.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Reserved {
    /// The bytes of all segments.
    pub(crate) reserved_bytes: u64,
    /// What tensors have and the program did not ask for.
    pub(crate) rounding_bytes: u64,
    /// The bytes of tensors that the program has freed, but that work on another stream may use.
    pub(crate) awaiting_bytes: u64,
    /// The unused bytes in segments with tensors. Like the next figure, it is of the stream of the newest request, outside of private pools.
    pub(crate) unused_beside_tensors_bytes: u64,
    /// The bytes of segments without tensors.
    pub(crate) unused_segments_bytes: u64,
    /// The unused bytes of segments that PyTorch keeps for other streams.
    pub(crate) unused_of_other_streams_bytes: u64,
    /// The unused bytes of private pools, such as those of captured graphs.
    pub(crate) unused_in_private_pools_bytes: u64,
    /// How much of the unused bytes is in segments whose pool is not known: PyTorch names the pools of the segments that it has at the end.
    pub(crate) unused_in_unknown_pools_bytes: u64,
    /// The bytes of tensors that lie in no segment, or over other tensors. If it is not 0, the file contradicts itself.
    pub(crate) outside_segments_bytes: u64,
    /// How many pieces are unused of the stream of the newest request, outside of private pools.
    pub(crate) unused_pieces: u64,
    /// The largest request that such a piece has room for.
    pub(crate) largest_fit_bytes: u64,
    /// The lines whose tensors keep segments of which a part is unused, most first.
    pub(crate) kept_by: Vec<Keeper>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) segments: Option<Vec<SegmentFigures>>,
    /// How many segments have tensors and unused room, outside of private pools.
    #[serde(skip)]
    partly_used: u64,
    #[serde(skip)]
    is_expandable: bool,
    #[serde(skip)]
    has_private_pools: bool,
}

/// Tensors of one line that keep segments of which a part is unused.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Keeper {
    pub(crate) line: Option<String>,
    pub(crate) caller: Option<String>,
    pub(crate) class: Option<&'static str>,
    /// Their module, if all have the same.
    pub(crate) module: Option<String>,
    pub(crate) bytes: u64,
    pub(crate) tensors: u64,
    pub(crate) segments: u64,
    /// The unused bytes of these segments. Tensors of other lines may keep them too.
    pub(crate) unused_bytes: u64,
    /// Whether they have equally many bytes in each segment.
    #[serde(skip)]
    is_even: bool,
}

/// A segment at one moment, for JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SegmentFigures {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) stream: u64,
    /// 0 for the pool that all of the program shares, else the number of a private pool. `None` if it is not known.
    pub(crate) pool: Option<u16>,
    pub(crate) used_bytes: u64,
    pub(crate) blocks: Vec<BlockFigures>,
}

/// A tensor in a segment. What is between two of them is unused.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct BlockFigures {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) requested_bytes: u64,
    /// Whether the program has freed it, while work on another stream may use it.
    pub(crate) is_awaiting: bool,
    pub(crate) line: Option<String>,
    pub(crate) caller: Option<String>,
    pub(crate) module: Option<String>,
    pub(crate) class: Option<&'static str>,
}

/// What the tensors of a keeper have in common.
type Key<'a> = (Option<&'a str>, Option<&'a str>, Option<TensorClass>);

/// The tensors of a keeper in one segment, or in several.
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

/// What is known of the origin of a tensor.
fn known<'a>(tensors: &'a Tensors, tensor: &Tensor) -> (Option<&'a Origin>, Option<TensorClass>) {
    let at = tensor.origin as usize;
    (tensors.origins.get(at), tensors.classes.as_ref().and_then(|classes| *classes.get(at)?))
}

impl Reserved {
    /// The memory after this many steps of a device, which is `state`. With `has_segments`, each segment is listed.
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
        for segment in state.segments(is_expandable) {
            let pieces = state.pieces(&segment);
            let used: u64 = pieces.iter().filter(|piece| piece.tensor.is_some()).map(|piece| piece.bytes).sum();
            inside += used;
            all.add(&segment, &pieces, used, stream);
            if used > 0 && used < segment.bytes && !segment.of.is_private() {
                all.partly_used += 1;
                keep(&mut keepers, tensors, &pieces, segment.bytes - used);
            }
            if has_segments {
                listed.push(SegmentFigures::of(tensors, &segment, &pieces, used));
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

    /// Adds the bytes of a segment that are unused.
    fn add(&mut self, segment: &Segment, pieces: &[Piece<'_>], used: u64, stream: u64) {
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
        if segment.of.is_private() || of != stream {
            return;
        }
        let most = if bytes == SMALL_SEGMENT { SMALL_SEGMENT / 2 } else { u64::MAX };
        for piece in pieces.iter().filter(|piece| piece.tensor.is_none()) {
            self.unused_pieces += 1;
            self.largest_fit_bytes = self.largest_fit_bytes.max(piece.bytes.min(most));
        }
    }

    /// All that no tensor has.
    fn unused(&self) -> u64 {
        self.unused_beside_tensors_bytes
            + self.unused_segments_bytes
            + self.unused_of_other_streams_bytes
            + self.unused_in_private_pools_bytes
    }

    /// `400 MiB from the driver: asked for 305 MiB (76 %), unused beside tensors 50 MiB (12 %), unused segments 45 MiB (11 %)`
    pub(super) fn in_words(&self, requested: u64) -> String {
        let parts = [
            ("asked for", requested),
            ("rounding", self.rounding_bytes),
            ("freed, in use by another stream,", self.awaiting_bytes),
            ("unused beside tensors", self.unused_beside_tensors_bytes),
            ("unused segments", self.unused_segments_bytes),
            ("unused of other streams", self.unused_of_other_streams_bytes),
            ("unused in private pools of graphs", self.unused_in_private_pools_bytes),
        ];
        // It is more than the segments have if the file contradicts itself.
        let whole = parts.iter().map(|(_, bytes)| bytes).sum();
        let share = |bytes: u64| percent(bytes.try_into().unwrap_or(i64::MAX), whole);
        let words: Vec<_> = parts
            .iter()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(name, bytes)| format!("{name} {} ({})", Bytes::new(*bytes), share(*bytes)))
            .collect();
        let nothing = if words.is_empty() { "nothing".to_owned() } else { words.join(", ") };
        format!("{} from the driver: {nothing}", Bytes::new(self.reserved_bytes))
    }

    /// Why a part is unused, each line with its name. Empty if that is little.
    pub(super) fn reasons(&self) -> Vec<(&'static str, String)> {
        let mut lines = Vec::new();
        if self.unused() == 0 || self.unused().saturating_mul(MATTERS) < self.reserved_bytes {
            return lines;
        }
        if self.unused_pieces > 0 {
            let unused = Bytes::new(self.unused_beside_tensors_bytes + self.unused_segments_bytes);
            let (fit, pieces) = (Bytes::new(self.largest_fit_bytes), counted(self.unused_pieces, "piece", "pieces"));
            let text = format!("a request of at most {fit} without a new segment: {unused} are unused, in {pieces}");
            lines.push(("fits", text));
        }
        if self.has_private_pools && self.unused_in_unknown_pools_bytes > 0 {
            let bytes = Bytes::new(self.unused_in_unknown_pools_bytes);
            let why = "may be in private pools: their segments were freed before the end, where PyTorch names the pools";
            lines.push(("not known", format!("{bytes} of it {why}")));
        }
        // Parts of expandable segments can be returned one by one.
        if self.is_expandable {
            return lines;
        }
        let shown = self.kept_by.iter().filter(|keeper| keeper.unused_bytes * MATTERS >= self.unused());
        lines.extend(shown.take(MOST_HOLDERS).map(|keeper| ("kept by", keeper.in_words())));
        if self.partly_used >= MANY && self.unused_beside_tensors_bytes * MATTERS >= self.reserved_bytes {
            let advice = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True gives unused parts back; `gpumem what-if -- PROGRAM` measures it";
            lines.push(("advice", advice.to_owned()));
        }
        lines
    }

    /// Draws the largest segments that have unused room.
    pub(super) fn write_segments(&self, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
        let has_room = |segment: &&SegmentFigures| segment.used_bytes < segment.bytes;
        let mut largest: Vec<_> = self.segments.iter().flatten().filter(has_room).collect();
        largest.sort_by_key(|segment| Reverse(segment.bytes));
        let count = largest.len();
        largest.truncate(MOST_SEGMENTS);
        let Some(most) = largest.first().map(|segment| segment.bytes.max(1)) else { return Ok(()) };
        let which = if count > largest.len() { format!("{} of {count}", largest.len()) } else { count.to_string() };
        let text = format!("the largest {which} with unused room (█ used, ▒ partly, · unused)");
        writeln!(out, "{}{text}", paint.on(Role::Faint, format!("{:<9}", "segments")))?;
        let columns = paint.width().saturating_sub(28).clamp(1, MOST_COLUMNS);
        for segment in largest {
            let columns = share_of(segment.bytes, most, columns).max(1);
            let size = Bytes::new(segment.bytes).to_string();
            writeln!(out, " {:012x} {size:>11} {}", segment.address, paint.on(Role::Bar, segment.bar(columns)))?;
        }
        Ok(())
    }
}

/// So many of `columns` are this share of a whole.
fn share_of(part: u64, whole: u64, columns: usize) -> usize {
    usize::try_from(u128::from(part) * columns as u128 / u128::from(whole.max(1))).unwrap_or(0).min(columns)
}

/// Adds the tensors of a segment, of which so many bytes are unused, to those that keep segments.
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

    /// `train.py:31, optimizer, holds 2 MiB in each of 14 segments: 280 MiB cannot be returned`
    fn in_words(&self) -> String {
        let names = self.class.into_iter().chain(self.module.as_deref());
        let names: String = names.flat_map(|name| [", ", name]).collect();
        let names = if names.is_empty() { names } else { names + "," };
        let (line, unused) = (self.line.as_deref().unwrap_or(NO_LINE), Bytes::new(self.unused_bytes));
        let held = match self.segments {
            1 => format!("{} in a segment", Bytes::new(self.bytes)),
            count if self.is_even => format!("{} in each of {count} segments", Bytes::new(self.bytes / count)),
            count => format!("{} in {count} segments", Bytes::new(self.bytes)),
        };
        format!("{line}{names} holds {held}: {unused} cannot be returned")
    }
}

impl SegmentFigures {
    fn of(tensors: &Tensors, segment: &Segment, pieces: &[Piece<'_>], used_bytes: u64) -> Self {
        let block = |piece: &Piece<'_>| {
            let tensor = piece.tensor?;
            let (origin, class) = known(tensors, tensor);
            Some(BlockFigures {
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

    /// Which parts are used.
    fn bar(&self, columns: usize) -> String {
        let mut used = vec![0_u64; columns];
        let edge = |column: usize| self.address + (u128::from(self.bytes) * column as u128 / columns as u128) as u64;
        for block in &self.blocks {
            let end = block.address + block.bytes;
            let first = share_of(block.address - self.address, self.bytes, columns);
            for (column, used) in used.iter_mut().enumerate().skip(first) {
                let [begin, until] = [edge(column), edge(column + 1)];
                if begin >= end {
                    break;
                }
                *used += until.min(end).saturating_sub(begin.max(block.address));
            }
        }
        let sign = |(column, used): (usize, u64)| match used {
            0 => '·',
            used if used == edge(column + 1) - edge(column) => '█',
            _ => '▒',
        };
        used.into_iter().enumerate().map(sign).collect()
    }
}

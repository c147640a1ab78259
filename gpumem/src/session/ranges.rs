//! The ranges that the program marks with NVTX: each is a scope of its thread.

use std::{
    borrow::Cow,
    cell::{Cell, RefCell},
    panic::Location,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use super::{
    GpuMemTrace,
    communicators::{self, Creation},
    of_process,
};
use crate::{
    nvtx::{Payload, RangeObserver, set_observer},
    source::call_before_allocations,
};

/// The largest number of simultaneous scopes of a thread's ranges. A program that never ends its ranges must not exhaust memory.
const MOST_OPEN: usize = 1000;

/// The observer of NVTX, for the library that is injected into programs.
#[doc(hidden)]
pub static NVTX_OBSERVER: RangeObserver = RangeObserver { pushed, popped, marked };

/// A range that has not ended.
struct Range {
    domain: usize,
    scope: Scope,
    /// The NCCL communicator that the range creates.
    creates: Option<Creation>,
}

enum Scope {
    Open(#[expect(dead_code, reason = "its drop ends the scope")] GpuMemTrace),
    /// The range started before the recording; it becomes a scope later.
    Awaited(String),
}

#[derive(Default)]
struct Ranges {
    open: Vec<Range>,
    /// The number of open ranges inside the kept ones.
    deeper: u64,
}

/// True while a recording is made. Until then nothing else in gpumem may be called: the first call creates the settings of the process, and
/// may call the driver before the program has initialized it.
static IS_RECORDED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static RANGES: RefCell<Ranges> = RefCell::default();
    /// True if some ranges may be waiting to become scopes.
    static ARE_AWAITED: Cell<bool> = const { Cell::new(false) };
}

/// Returns the name without the numbers that PyTorch's `emit_nvtx` adds, which differ for each operation: `aten::mm, seq = 12,
/// op_id = 1`.
fn without_numbers(name: &str) -> &str {
    let end = [", seq = ", ", op_id = ", ", sizes = "].iter().filter_map(|part| name.find(part)).min();
    end.map_or(name, |end| &name[..end])
}

fn pushed(domain: usize, name: &str, payload: Option<Payload>) {
    let creates = Creation::of(name);
    let communicator = creates.map(|creation| creation.number).or_else(|| communicators::of_call(name, payload));
    let name = match communicator {
        Some(number) => Cow::Owned(communicators::name_of_call(name, number)),
        None => Cow::Borrowed(without_numbers(name)),
    };
    with_ranges(|ranges| {
        if ranges.open.len() == MOST_OPEN {
            ranges.deeper += 1;
            return;
        }
        open_awaited(&mut ranges.open);
        ranges.open.push(Range { domain, scope: Scope::of(&name), creates });
    });
}

fn popped(domain: usize, payload: Option<Payload>) {
    with_ranges(|ranges| {
        if ranges.deeper > 0 {
            ranges.deeper -= 1;
        } else if let Some(at) = ranges.open.iter().rposition(|range| range.domain == domain) {
            // Ranges of different domains need not be nested. The program may also end more ranges than it started.
            let range = ranges.open.remove(at);
            if let Some(mark) = range.creates.zip(payload).and_then(|(creation, payload)| creation.created(payload)) {
                marked(&mark, false);
            }
            drop(range);
            open_awaited(&mut ranges.open);
        }
    });
}

fn marked(name: &str, is_end: bool) {
    // Nothing else in gpumem may be called before the recording.
    if !IS_RECORDED.load(Relaxed) {
        return;
    }
    let name = without_numbers(name);
    let name = if is_end { format!("{name} (end)").into() } else { Cow::Borrowed(name) };
    of_process().record_mark(&name, Location::caller());
}

/// Notes that the recording has started. The ranges of a thread become scopes before its next range or allocation, and not now: the driver
/// is being initialized, and a scope would fail to get the current device.
pub(super) fn recording_started() {
    set_observer(&NVTX_OBSERVER);
    call_before_allocations(|| {
        if ARE_AWAITED.replace(false) {
            with_ranges(|ranges| open_awaited(&mut ranges.open));
        }
    });
    IS_RECORDED.store(true, Relaxed);
}

/// Notes that the recording has ended.
pub(super) fn recording_ended() {
    IS_RECORDED.store(false, Relaxed);
}

fn open_awaited(open: &mut [Range]) {
    for range in open {
        if let Scope::Awaited(name) = &range.scope {
            range.scope = Scope::of(name);
        }
    }
}

impl Scope {
    fn of(name: &str) -> Self {
        if !IS_RECORDED.load(Relaxed) {
            return Self::awaited(name);
        }
        let trace = GpuMemTrace::builder().ctx(name).silent(true).on_exit_report(false).start();
        trace.map_or_else(|_| Self::awaited(name), Self::Open)
    }

    fn awaited(name: &str) -> Self {
        ARE_AWAITED.set(true);
        Self::Awaited(name.to_owned())
    }
}

fn with_ranges(run: impl FnOnce(&mut Ranges)) {
    // The locals of a thread may already be destroyed while it ends.
    _ = RANGES.try_with(|ranges| ranges.try_borrow_mut().map(|mut ranges| run(&mut ranges)));
}

#[cfg(test)]
mod tests {
    use super::without_numbers;

    #[test]
    fn operations_of_pytorch_have_one_name() {
        assert_eq!(without_numbers("aten::mm, seq = 12, op_id = 1"), "aten::mm");
        assert_eq!(without_numbers("aten::t, op_id = 33, sizes = [[2, 3]]"), "aten::t");
        assert_eq!(without_numbers("forward"), "forward");
    }
}

//! Intercepts calls without a session. The project's tests use this to check that both sources record the same calls.

use std::{
    sync::{Mutex, PoisonError},
    thread::{self, ThreadId},
};

use super::driver;
use crate::{
    error::{Kind, Result},
    sys::{
        calls::{self, Call, Caller, Observe},
        cupti, dispatch,
    },
};

/// The calls so far, each with its thread: the dispatch table's, and CUPTI's.
static CALLS: [Mutex<Vec<(ThreadId, String)>>; 2] = [const { Mutex::new(Vec::new()) }; 2];

/// Keeps each call; `AT` is its index in [`CALLS`].
struct KeepCalls<const AT: usize>;

impl<const AT: usize> Observe for KeepCalls<AT> {
    fn other(_: &Caller, call: &Call) {
        // CUPTI does not report these calls, so the driver's memory is not measured through CUPTI.
        if matches!(call, Call::DriverStarts { .. } | Call::DriverDone { .. } | Call::PoolDestroyed { .. }) {
            return;
        }
        let mut calls = CALLS[AT].lock().unwrap_or_else(PoisonError::into_inner);
        calls.push((thread::current().id(), format!("{call:?}")));
    }
}

/// Returns the driver functions that are intercepted. A driver need not have all of them.
pub fn intercepted_functions() -> Vec<&'static str> {
    calls::names().collect()
}

/// Runs a program. Returns the calls that the dispatch table recorded, and those that CUPTI recorded. The calls of each thread are together
/// and in order. The order of the threads may differ between the two sources.
///
/// # Errors
/// Returns an error if one of the sources cannot be used, or is in use.
pub fn calls_of_both_sources(program: impl FnOnce()) -> Result<[Vec<String>; 2]> {
    if let Some(live) = driver::subscribed() {
        return Err(Kind::OtherSource { requested: "both", using: live.source.name() }.into());
    }
    dispatch::subscribe::<KeepCalls<0>>()?;
    let cupti = cupti::subscribe::<KeepCalls<1>>();
    if cupti.is_ok() {
        program();
    }
    dispatch::unsubscribe();
    cupti::unsubscribe();
    let calls =
        CALLS.each_ref().map(|calls| std::mem::take(&mut *calls.lock().unwrap_or_else(PoisonError::into_inner)));
    // The threads are in the order in which the first source saw them.
    let mut threads: Vec<ThreadId> = Vec::new();
    for (thread, _) in calls.iter().flatten() {
        if !threads.contains(thread) {
            threads.push(*thread);
        }
    }
    let of_each = |calls: Vec<(ThreadId, String)>| {
        let of = |thread: &ThreadId| {
            let its: Vec<_> = calls.iter().filter(|(on, _)| on == thread).collect();
            its.into_iter().map(move |(_, call)| format!("{thread:?}: {call}")).collect::<Vec<_>>()
        };
        threads.iter().flat_map(of).collect()
    };
    cupti.map(|()| calls.map(of_each))
}

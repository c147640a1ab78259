//! For tests: what each of the two sources tells of the same calls.

use std::{
    sync::{Mutex, PoisonError},
    thread::{self, ThreadId},
};

use super::driver;
use crate::{
    error::{Kind, Result},
    sys::{
        calls::{Call, Caller, IdKind, Observe},
        cupti, dispatch,
    },
};

/// What was told so far, and on which thread: by the dispatch table, then by CUPTI.
static TOLD: [Mutex<Vec<(ThreadId, String)>>; 2] = [const { Mutex::new(Vec::new()) }; 2];

/// Takes down what is told; `AT` is the place in [`TOLD`].
struct Recorder<const AT: usize>;

impl<const AT: usize> Observe for Recorder<AT> {
    fn pooled(caller: &Caller, address: u64, bytes: u64, stream: u64) {
        Self::other(caller, &Call::Pooled { address, bytes, stream, pool: None });
    }

    fn freeing(caller: &Caller, address: u64) {
        Self::other(caller, &Call::Freeing { id_kind: IdKind::Address, id: address });
    }

    fn other(_: &Caller, call: &Call) {
        let mut told = TOLD[AT].lock().unwrap_or_else(PoisonError::into_inner);
        told.push((thread::current().id(), format!("{call:?}")));
    }
}

/// Runs a program, and gives back what the dispatch table told of its calls, and what CUPTI told: each thread's by itself, in its
/// order, since threads need not have the same order in both.
///
/// # Errors
/// When one of the sources cannot be used, or is in use.
pub fn told_by_both(program: impl FnOnce()) -> Result<[Vec<String>; 2]> {
    if let Some(live) = driver::subscribed() {
        return Err(Kind::OtherSource { asked: "both", using: live.source.name() }.into());
    }
    dispatch::subscribe::<Recorder<0>>()?;
    let cupti = cupti::subscribe::<Recorder<1>>();
    if cupti.is_ok() {
        program();
    }
    dispatch::unsubscribe();
    cupti::unsubscribe();
    let told = TOLD.each_ref().map(|told| std::mem::take(&mut *told.lock().unwrap_or_else(PoisonError::into_inner)));
    // In the order in which the first source heard of them.
    let mut threads: Vec<ThreadId> = Vec::new();
    for (thread, _) in told.iter().flatten() {
        if !threads.contains(thread) {
            threads.push(*thread);
        }
    }
    let of_each = |told: Vec<(ThreadId, String)>| {
        let of = |thread: &ThreadId| {
            let its: Vec<_> = told.iter().filter(|(on, _)| on == thread).collect();
            its.into_iter().map(move |(_, call)| format!("{thread:?}: {call}")).collect::<Vec<_>>()
        };
        threads.iter().flat_map(of).collect()
    };
    cupti.map(|()| told.map(of_each))
}

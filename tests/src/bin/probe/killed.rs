//! A program that is killed while it allocates.

use std::{
    fs::{self, File},
    hint::black_box,
    io::{self, Write},
    process,
    sync::mpsc,
    thread,
    time::Duration,
};

use gpumem_core::model::EventKind;
use gpumem_recording::{Reader, Step};

use crate::Trouble;
use crate::raw::{self, invoke};

/// Allocates blocks until the process is killed. The first block has 512 bytes, each further block has 512 bytes more, and every
/// second block is freed at once. When a call has returned, its number is written to stdout.
///
/// If `when` is `stderr`, the process is killed as soon as something was written to stderr, which is a file. Otherwise `when`
/// contains a number of microseconds, and a number of calls: the time starts after these calls have returned, however slow the
/// machine is.
pub(crate) fn allocate_until_killed(when: &str) -> Result<String, Trouble> {
    let (micros, after) = if when == "stderr" {
        (None, 0)
    } else {
        let (micros, after) = when.split_once(' ').unwrap_or((when, "0"));
        (Some(Duration::from_micros(micros.parse()?)), after.parse()?)
    };
    let (start, may_start) = mpsc::channel::<()>();
    thread::spawn(move || {
        _ = may_start.recv();
        match micros {
            Some(micros) => thread::sleep(micros),
            None => {
                while fs::metadata("/proc/self/fd/2").is_ok_and(|stderr| stderr.len() == 0) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        raw::kill(process::id().cast_signed());
    });
    let mut start = Some(start);
    let mut out = io::stdout().lock();
    let mut calls = 0_u64;
    for number in 1.. {
        if calls >= after {
            // The other thread waits until the sender is dropped.
            start = None;
        }
        let mut address = 0_u64;
        if invoke("cuMemAlloc_v2", [&raw mut address as u64, 512 * number, 0, 0, 0, 0])? != 0 {
            break;
        }
        calls += 1;
        writeln!(out, "{calls}")?;
        if number % 2 == 0 {
            invoke("cuMemFree_v2", [address, 0, 0, 0, 0, 0])?;
            calls += 1;
            writeln!(out, "{calls}")?;
        }
    }
    // The device has no memory left.
    drop(start);
    thread::park();
    Err("it was not killed".into())
}

/// Allocates blocks of 1 MiB until the process is killed after this many microseconds. Each block has a new stack. When a call
/// has returned, its number is written to stdout.
pub(crate) fn allocate_on_new_stacks(micros: u64) -> Result<String, Trouble> {
    thread::spawn(move || {
        thread::sleep(Duration::from_micros(micros));
        raw::kill(process::id().cast_signed());
    });
    let mut out = io::stdout().lock();
    for number in 0..1 << BITS {
        let mut failed = None;
        by_path(number, BITS, &mut || failed = allocate_and_free().err());
        failed.map_or(Ok(()), Err)?;
        writeln!(out, "{}", number + 1)?;
    }
    thread::park();
    Err("it was not killed".into())
}

/// Each number of this many bits has its own stack.
const BITS: u32 = 14;

/// Calls `function` through one of two functions for each bit of `path`.
fn by_path(path: u32, bits: u32, function: &mut dyn FnMut()) {
    match (bits, path & 1) {
        (0, _) => function(),
        (_, 0) => even(path, bits, function),
        _ => odd(path, bits, function),
    }
    black_box(());
}

#[inline(never)]
fn even(path: u32, bits: u32, function: &mut dyn FnMut()) {
    by_path(path >> 1, bits - 1, function);
    black_box(0);
}

#[inline(never)]
fn odd(path: u32, bits: u32, function: &mut dyn FnMut()) {
    by_path(path >> 1, bits - 1, function);
    black_box(1);
}

/// Allocates and frees a hundred times in each round. The number of events does not depend on how busy the machine is.
pub(crate) fn be_busy(rounds: u64) -> Result<String, Trouble> {
    for _ in 0..rounds {
        for _ in 0..100 {
            allocate_and_free()?;
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok("done".to_owned())
}

fn allocate_and_free() -> Result<(), Trouble> {
    let mut address = 0_u64;
    let result = invoke("cuMemAlloc_v2", [&raw mut address as u64, 1 << 20, 0, 0, 0, 0])?;
    if result != 0 {
        return Err(format!("it is refused with {result}").into());
    }
    invoke("cuMemFree_v2", [address, 0, 0, 0, 0, 0])?;
    Ok(())
}

/// Returns whether a recording in this folder, which is still being written, contains an allocation.
pub(crate) fn has_an_allocation(folder: &str) -> Result<bool, Trouble> {
    for entry in fs::read_dir(folder)? {
        // The file is not a recording until its first bytes are written.
        let Ok(mut reader) = Reader::new(File::open(entry?.path())?) else { continue };
        while let Some(step) = reader.step()? {
            if matches!(step, Step::Event(event) if matches!(event.kind, EventKind::Alloc { .. })) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

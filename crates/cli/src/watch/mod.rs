//! Shows the memory of GPUs, processes and running recordings in a terminal, for `gpumem watch`.
//!
//! `sample.rs` makes readings, `state.rs` defines the state and its changes, `draw.rs` draws it, and `screen.rs`
//! manages the terminal. Readings are made on a separate thread, so that keys are answered while it waits for the
//! driver.

mod draw;
mod live;
mod sample;
mod screen;
mod state;
#[cfg(test)]
mod tests;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use ratatui::crossterm::event;

#[cfg(feature = "export")]
pub(crate) use self::live::Live;
pub(crate) use self::sample::{Sample, Sampler};
use self::{draw::Looks, screen::Screen, state::State};

/// Keys and signals are handled after this time at the latest.
const PATIENCE: Duration = Duration::from_millis(100);

/// Shows samples until the user ends the command, or until `count` samples were shown.
pub(crate) fn show(mut sampler: Sampler, every: Duration, count: Option<u64>, has_colours: bool) -> io::Result<()> {
    let is_over = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&is_over))?;
    }
    // Set when this process was stopped: the shell and other programs used the terminal.
    let was_stopped = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGCONT, Arc::clone(&was_stopped))?;
    let (to, from) = mpsc::sync_channel(1);
    let ended = Arc::clone(&is_over);
    thread::spawn(move || {
        while !ended.load(Relaxed) {
            let started = Instant::now();
            if to.send(sampler.sample()).is_err() {
                break;
            }
            // Readings take at most half the time of a processor, even if a reading is slow.
            thread::sleep(every.saturating_sub(started.elapsed()).max(started.elapsed()));
        }
    });
    let looks = Looks { has_colours, every };
    let mut screen = Screen::open()?;
    let mut state = State::default();
    let mut shown = 0;
    while !state.is_over && !is_over.load(Relaxed) && count.is_none_or(|count| shown <= count) {
        if std::mem::take(&mut state.is_suspended) {
            screen.suspend()?;
            was_stopped.store(true, Relaxed);
        }
        if was_stopped.swap(false, Relaxed) {
            screen.reopen()?;
        }
        screen.draw(|frame| draw::draw(frame, &mut state, looks))?;
        if count == Some(shown) {
            break;
        }
        if event::poll(PATIENCE)? {
            state = state.after(&event::read()?);
        }
        loop {
            match from.try_recv() {
                Ok(sample) => {
                    state = state.with(sample);
                    shown += 1;
                }
                Err(mpsc::TryRecvError::Empty) => break,
                Err(mpsc::TryRecvError::Disconnected) if is_over.load(Relaxed) => break,
                // The thread's panic has already closed the screen.
                Err(mpsc::TryRecvError::Disconnected) => return Err(io::Error::other("nothing is read any more")),
            }
        }
    }
    is_over.store(true, Relaxed);
    Ok(())
}

//! The log of RMM's `logging_resource_adaptor`: `Thread,Time,Action,Pointer,Size,Stream`. A stream that is not known is 0.

use std::io::{self, Write};

use crate::history::History;

pub(super) fn write(history: &History, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "Thread,Time,Action,Pointer,Size,Stream")?;
    let began = history.definitions().process().began.as_micros();
    for (change, stream) in history.lives.changes().zip(history.streams()) {
        let block = history.lives.block(change.block);
        let action = match change.kind.blocks() {
            1.. => "allocate",
            // The format has no action for a block that shrinks.
            0 => continue,
            _ => "free",
        };
        let micros = began + u128::from(change.time / 1000);
        let (seconds, micros) = (micros / 1_000_000 % 86_400, micros % 1_000_000);
        let [hour, minute, second] = [seconds / 3600, seconds / 60 % 60, seconds % 60];
        writeln!(
            out,
            "{},{hour:02}:{minute:02}:{second:02}:{micros:06},{action},{:#x},{},{:#x}",
            change.thread,
            block.key,
            block.bytes,
            stream.unwrap_or(0)
        )?;
    }
    Ok(())
}

//! Tests that recordings of earlier versions are read.

use std::io::Cursor;

use gpumem_core::recording::{Reader, ReplayedReport};

/// The program has the simulated device and two traces of a pool's high-water mark. This version has no figures for them, so
/// their lines have no numbers. An exact trace beside them has its own.
#[test]
fn traces_of_a_high_water_mark_are_read_as_off() {
    let file = include_bytes!("old/pool-gauge.gpumem");
    let mut reader = Reader::new(Cursor::new(file)).unwrap();
    let mut lines = Vec::new();
    reader
        .replay(|output| {
            if let ReplayedReport::Report(report) = output {
                let (trace, line) = (&report.trace, report.to_string());
                lines.push(format!(
                    "{}, {}: {}",
                    trace.gauge,
                    trace.source,
                    line.trim_start_matches("△Used Peaked MB: ")
                ));
            }
        })
        .unwrap();
    assert!(reader.skipped().is_nothing(), "{:?}", reader.skipped());
    assert_eq!(
        lines,
        [
            "off, off:      ?      ?   (train > pool)",
            "off, off:      ?      ?     (pool > second)",
            "off, off:      ?      ?   (train > pool)",
            "off, off:      ?      ?     (pool > second: exit)",
            "off, off:      ?      ?   (train > pool: exit)",
            "exact, simulation:      5    120 (train: exit)",
        ]
    );
}

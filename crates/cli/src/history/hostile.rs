//! Tests that all reports and formats finish without a panic on recordings that no session writes.

use std::{fs, io, path::Path, time::Duration};

use gpumem_core::{export::Paint, model::Bytes};

use gpumem_recording::testing::{Random, items, written};

use super::{BlockLife, History, Moment};
use crate::{
    formats::Format,
    page::Page,
    report::{json, moment, overview::Overview, places, summary, tensors},
    what_if,
};

#[test]
fn all_reports_and_formats_of_hostile_recordings_end() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hostile.capture");
    let (mut changes, mut tensors) = (0, 0);
    for seed in 0..40 {
        fs::write(&file, written(&items(&mut Random::new(seed), 1_000))).unwrap();
        let mut history = History::read(&file).unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
        changes += history.lives.change_count();
        let devices = history.tensors.iter().flat_map(|tensors| &tensors.devices);
        tensors += devices.filter(|device| device.live.peak_at.is_some()).count();
        assert_peaks_of_tensors(&history);
        everything(&mut history, folder.path());
    }
    assert!(changes > 2_000, "{changes}: most is not left out");
    assert!(tensors > 20, "{tensors}: most is not left out");
}

/// Checks that the blocks on the page add up to the peak in the summary.
fn assert_peaks_of_tensors(history: &History) {
    let Some(tensors) = &history.tensors else { return };
    let all = &tensors.blocks;
    for (number, device) in (0_u16..).zip(&tensors.devices) {
        let (Some(at), Some(steps)) = (device.live.peak_at, device.peak_steps()) else { continue };
        let is_tensor = |block: &BlockLife| block.device == number && block.origin != all.segment_origin;
        let live = all.lives.blocks().map(|(_, block)| block).filter(is_tensor).filter(|block| block.is_live_after(at));
        assert_eq!(live.map(|block| block.bytes).sum::<u64>(), device.live.peak);
        assert_eq!(device.allocated[steps - 1], device.live.peak);
    }
}

fn everything(history: &mut History, folder: &Path) {
    let mut out = io::sink();
    let overview = Overview::of(history);
    json::write(&overview, &mut out).unwrap();
    summary::write_all(std::slice::from_ref(&overview), &mut out, Paint::ANSI).unwrap();
    summary::write_all(&[overview.clone(), overview], &mut out, Paint::PLAIN).unwrap();
    places::write(history, &mut out, Paint::PLAIN).unwrap();
    if let Ok(answer) = what_if::ask_recording(history, Bytes::gib(80), 1) {
        answer.write(&mut out, Paint::PLAIN).unwrap();
    }
    for at in [Moment::Start, Moment::Peak, Moment::End, Moment::Oom, Moment::Time(Duration::from_nanos(500))] {
        moment::write_at(history, at, &mut out, Paint::PLAIN).unwrap();
        tensors::write_at(history, at, true, &mut out, Paint::PLAIN).unwrap();
        moment::write_between(history, [Moment::Peak, at], &mut out, Paint::PLAIN).unwrap();
        for format in [Format::Folded, Format::Pprof] {
            format.write(history, at, true, &mut out).unwrap();
        }
    }
    for format in [Format::Json, Format::Perfetto, Format::Torch, Format::Svg] {
        format.write(history, Moment::Peak, false, &mut out).unwrap();
    }
    let mut page = Page::default();
    page.add(history, true).unwrap();
    page.write(&mut out).unwrap();
    #[cfg(feature = "parquet")]
    crate::formats::parquet::write(history, &folder.join("hostile")).unwrap();
    #[cfg(not(feature = "parquet"))]
    let _ = folder;
}

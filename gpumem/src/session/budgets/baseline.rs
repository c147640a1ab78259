//! The peaks of earlier runs, by the name of the test, in a JSON file.

use std::path::Path;

use crate::error::{Kind, Result};

/// Returns the peak of this test in the baseline.
#[cfg(feature = "baseline")]
pub(super) fn read(path: &Path, name: &str) -> Result<u64> {
    let known = crate::baseline_file::Baseline::read(path)?;
    let is_there = known.is_some();
    let peak = known.and_then(|known| known.peaks.get(name).map(|peak| peak.0.get()));
    peak.ok_or_else(|| {
        let cause = if is_there { format!("it has no peak of `{name}`") } else { "there is no such file".to_owned() };
        let detail = format!("{cause}; run the test with GPUMEM_BASELINE_UPDATE=1 to write it");
        Kind::BadBaseline { file: path.display().to_string(), detail }.into()
    })
}

/// Writes the peak of this test.
#[cfg(feature = "baseline")]
pub(super) fn write(path: &Path, name: &str, peak: u64) -> Result<()> {
    use crate::{
        baseline_file::{Baseline, Peak},
        model::Bytes,
    };

    Baseline::update(path, |baseline| _ = baseline.peaks.insert(name.to_owned(), Peak(Bytes::new(peak))))
}

#[cfg(not(feature = "baseline"))]
pub(super) fn read(_: &Path, _: &str) -> Result<u64> {
    Err(Kind::NotBuilt { feature: "baseline" }.into())
}

#[cfg(not(feature = "baseline"))]
pub(super) fn write(_: &Path, _: &str, _: u64) -> Result<()> {
    Err(Kind::NotBuilt { feature: "baseline" }.into())
}

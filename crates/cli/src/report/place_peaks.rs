//! The peak of each place.

use std::collections::HashMap;

use gpumem_core::derive::Stack;

use super::sums::NO_LINE;
use crate::history::{DeviceHistory, History, Lives, Origin, tensors::Tensors};

/// The peak of a place on a device.
#[derive(Debug)]
pub(super) struct PlacePeak {
    pub(super) device: u32,
    /// True if the place allocated PyTorch tensors, which are inside driver blocks.
    pub(super) is_of_tensors: bool,
    pub(super) place: String,
    pub(super) bytes: u64,
}

/// Returns the peak of each place, each at its own time. If PyTorch's tensors are known, they replace PyTorch's driver
/// blocks. Files below `folder` are named relative to it, wherever the program ran, and the others as in reports.
pub(super) fn place_peaks(history: &History, folder: Option<&str>) -> Vec<PlacePeak> {
    let line_below = |origin: &Origin| {
        let of = history.definitions();
        origin.line.as_ref().zip(folder).and_then(|(_, folder)| {
            let stack = Stack::new(&of.frames(origin.stack), "", of.process().own_module.as_deref());
            Some(stack.line?.strip_prefix(folder)?.strip_prefix('/')?.to_owned())
        })
    };
    let tensors = history.tensors.as_ref().filter(|tensors| tensors.missing.is_none());
    let place = |origin: &Origin| {
        let is_cache = tensors.is_some() && origin.library.as_deref() == Some("PyTorch");
        let name = || line_below(origin).unwrap_or_else(|| origin.place());
        (origin.kind.is_on_device() && !is_cache).then(name)
    };
    let mut all = peaks(&history.lives, &history.origins, place, &history.devices, false);
    if let Some(Tensors { blocks, origins, devices, .. }) = tensors {
        let line =
            |origin: &Origin| line_below(origin).or_else(|| origin.line.clone()).or_else(|| Some(NO_LINE.to_owned()));
        all.extend(peaks(&blocks.lives, origins, line, devices.iter().map(|device| &device.live), true));
    }
    all
}

/// Returns the peaks of places. `place` names an origin, and returns `None` for origins to leave out.
fn peaks<'a>(
    lives: &Lives,
    origins: &[Origin],
    place: impl Fn(&Origin) -> Option<String>,
    devices: impl IntoIterator<Item = &'a DeviceHistory>,
    is_of_tensors: bool,
) -> Vec<PlacePeak> {
    let mut numbers = HashMap::new();
    let mut names = Vec::new();
    let mut number = |name: String| {
        *numbers.entry(name).or_insert_with_key(|name| {
            names.push(name.clone());
            names.len() - 1
        })
    };
    let of_origin: Vec<_> = origins.iter().map(|origin| place(origin).map(&mut number)).collect();
    let devices: Vec<_> = devices.into_iter().map(|history| history.device.ordinal).collect();
    // The current memory of each place on each device, and its peak.
    let mut sums = vec![[0_i64; 2]; names.len() * devices.len()];
    for change in lives.changes() {
        let block = lives.block(change.block);
        // The origin index of PyTorch's segments is higher than those of all origins.
        let Some(place) = of_origin.get(block.origin as usize).copied().flatten() else { continue };
        let [now, most] = &mut sums[usize::from(block.device) * names.len() + place];
        *now += change.delta;
        *most = (*most).max(*now);
    }
    let places = devices.iter().flat_map(|device| names.iter().map(move |place| (*device, place)));
    let used = places.zip(sums).filter(|(_, [_, most])| *most > 0);
    used.map(|((device, place), [_, most])| PlacePeak {
        device,
        is_of_tensors,
        place: place.clone(),
        bytes: most.unsigned_abs(),
    })
    .collect()
}

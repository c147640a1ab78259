//! The peak of each place, and how the memory of a place changed.

use std::collections::HashMap;

use gpumem_core::derive::Stack;

use super::place_sums::NO_LINE;
use crate::history::{DeviceHistory, History, Lives, Origin, tensors::Tensors};

/// The peak of a place on a device.
#[derive(Clone, Debug)]
pub(super) struct PlacePeak {
    pub(super) device: u32,
    /// True if the place allocated PyTorch tensors, which are inside driver blocks.
    pub(super) is_of_tensors: bool,
    pub(super) place: String,
    pub(super) bytes: u64,
}

/// Blocks and the place of each of their origins.
struct Placed<'a> {
    lives: &'a Lives,
    /// `None` for origins to leave out.
    of_origin: Vec<Option<String>>,
    devices: Vec<u32>,
    is_of_tensors: bool,
}

/// Returns the peak of each place, each at its own time. If PyTorch's tensors are known, they replace PyTorch's driver
/// blocks. Files below `folder` are named relative to it, wherever the program ran, and the others as in reports.
pub(super) fn place_peaks(history: &History, folder: Option<&str>) -> Vec<PlacePeak> {
    placed(history, folder).iter().flat_map(peaks).collect()
}

/// Returns the changes of the memory of a place on its device, each with its time in nanoseconds. `of` is one of the
/// [`place_peaks`], without a folder.
pub(super) fn changes_of(history: &History, of: &PlacePeak) -> Vec<(u64, i64)> {
    let lists = placed(history, None).into_iter().filter(|list| list.is_of_tensors == of.is_of_tensors);
    let changes = lists.flat_map(|Placed { lives, of_origin, devices, .. }| {
        let is_here = |place: &Option<String>| place.as_ref() == Some(&of.place);
        let is_here: Vec<_> = of_origin.iter().map(is_here).collect();
        lives.changes().filter_map(move |change| {
            let block = lives.block(change.block);
            let is_on_device = devices.get(usize::from(block.device)) == Some(&of.device);
            let is_here = is_on_device && is_here.get(block.origin as usize).is_some_and(|is_here| *is_here);
            is_here.then_some((change.time, change.delta))
        })
    });
    changes.collect()
}

fn placed<'a>(history: &'a History, folder: Option<&str>) -> Vec<Placed<'a>> {
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
    let ordinals = |devices: &mut dyn Iterator<Item = &DeviceHistory>| -> Vec<u32> {
        devices.map(|history| history.device.ordinal).collect()
    };
    let mut all = vec![Placed {
        lives: &history.lives,
        of_origin: history.origins.iter().map(place).collect(),
        devices: ordinals(&mut history.devices.iter()),
        is_of_tensors: false,
    }];
    if let Some(Tensors { blocks, origins, devices, .. }) = tensors {
        let line =
            |origin: &Origin| line_below(origin).or_else(|| origin.line.clone()).or_else(|| Some(NO_LINE.to_owned()));
        all.push(Placed {
            lives: &blocks.lives,
            of_origin: origins.iter().map(line).collect(),
            devices: ordinals(&mut devices.iter().map(|device| &device.live)),
            is_of_tensors: true,
        });
    }
    all
}

fn peaks(Placed { lives, of_origin, devices, is_of_tensors }: &Placed<'_>) -> Vec<PlacePeak> {
    let mut numbers = HashMap::new();
    let mut names = Vec::new();
    let mut number = |name: &String| {
        *numbers.entry(name.clone()).or_insert_with_key(|name| {
            names.push(name.clone());
            names.len() - 1
        })
    };
    let of_origin: Vec<_> = of_origin.iter().map(|place| place.as_ref().map(&mut number)).collect();
    // The current memory of each place on each device, and its peak.
    let mut sums = vec![[0_i64; 2]; names.len() * devices.len()];
    for change in lives.changes() {
        let block = lives.block(change.block);
        // The origin index of PyTorch's segments is higher than all origins' own.
        let Some(place) = of_origin.get(block.origin as usize).copied().flatten() else { continue };
        let [now, most] = &mut sums[usize::from(block.device) * names.len() + place];
        *now += change.delta;
        *most = (*most).max(*now);
    }
    let places = devices.iter().flat_map(|device| names.iter().map(move |place| (*device, place)));
    let used = places.zip(sums).filter(|(_, [_, most])| *most > 0);
    used.map(|((device, place), [_, most])| PlacePeak {
        device,
        is_of_tensors: *is_of_tensors,
        place: place.clone(),
        bytes: most.unsigned_abs(),
    })
    .collect()
}

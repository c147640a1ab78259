//! The peak of each place, and how the memory of a place changed.

use std::collections::HashMap;

use gpumem_core::derive::Stack;

use super::place_sums::NO_LINE;
use crate::history::{DeviceHistory, History, Lives, Origin};

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
pub(crate) struct Placed<'a> {
    pub(crate) lives: &'a Lives,
    /// `None` for origins to leave out.
    of_origin: Vec<Option<String>>,
    pub(crate) devices: Vec<&'a DeviceHistory>,
    pub(crate) is_of_tensors: bool,
}

impl<'a> Placed<'a> {
    /// Returns the driver's blocks, with or without those of PyTorch's allocator. `folder` is that of [`place_peaks`].
    pub(crate) fn blocks(history: &'a History, folder: Option<&str>, has_cache: bool) -> Self {
        let place = |origin: &Origin| {
            let is_cache = !has_cache && origin.library.as_deref() == Some("PyTorch");
            let name = || line_below(history, origin, folder).unwrap_or_else(|| origin.place());
            (origin.kind.is_on_device() && !is_cache).then(name)
        };
        Self {
            lives: &history.lives,
            of_origin: history.origins.iter().map(place).collect(),
            devices: history.devices.iter().collect(),
            is_of_tensors: false,
        }
    }

    /// Returns PyTorch's tensors, if they are known.
    pub(crate) fn tensors(history: &'a History, folder: Option<&str>) -> Option<Self> {
        let tensors = history.tensors.as_ref().filter(|tensors| tensors.missing.is_none())?;
        let line = |origin: &Origin| {
            let line = line_below(history, origin, folder).or_else(|| origin.line.clone());
            Some(line.unwrap_or_else(|| NO_LINE.to_owned()))
        };
        Some(Self {
            lives: &tensors.blocks.lives,
            of_origin: tensors.origins.iter().map(line).collect(),
            devices: tensors.devices.iter().map(|device| &device.live).collect(),
            is_of_tensors: true,
        })
    }

    /// Returns the places, and the index of the place of each origin.
    pub(crate) fn numbered(&self) -> (Vec<&str>, Vec<Option<usize>>) {
        let (mut numbers, mut names) = (HashMap::new(), Vec::new());
        let mut number = |name| {
            *numbers.entry(name).or_insert_with(|| {
                names.push(name);
                names.len() - 1
            })
        };
        let of_origin = self.of_origin.iter().map(|place| place.as_deref().map(&mut number)).collect();
        (names, of_origin)
    }
}

/// Returns the line of an origin relative to `folder`, if it is below it.
fn line_below(history: &History, origin: &Origin, folder: Option<&str>) -> Option<String> {
    let of = history.definitions();
    let (_, folder) = origin.line.as_ref().zip(folder)?;
    let stack = Stack::new(&of.frames(origin.stack), "", of.process().own_module.as_deref());
    Some(stack.line?.strip_prefix(folder)?.strip_prefix('/')?.to_owned())
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
            let device = devices.get(usize::from(block.device)).map(|of| of.device.ordinal);
            let is_on_device = device == Some(of.device);
            let is_here = is_on_device && is_here.get(block.origin as usize).is_some_and(|is_here| *is_here);
            is_here.then_some((change.time, change.delta))
        })
    });
    changes.collect()
}

fn placed<'a>(history: &'a History, folder: Option<&str>) -> Vec<Placed<'a>> {
    let tensors = Placed::tensors(history, folder);
    let blocks = Placed::blocks(history, folder, tensors.is_none());
    [Some(blocks), tensors].into_iter().flatten().collect()
}

fn peaks(list: &Placed<'_>) -> Vec<PlacePeak> {
    let Placed { lives, devices, is_of_tensors, .. } = list;
    let (names, of_origin) = list.numbered();
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
    let places = devices.iter().flat_map(|device| names.iter().map(move |place| (device.device.ordinal, *place)));
    let used = places.zip(sums).filter(|(_, [_, most])| *most > 0);
    used.map(|((device, place), [_, most])| PlacePeak {
        device,
        is_of_tensors: *is_of_tensors,
        place: place.to_owned(),
        bytes: most.unsigned_abs(),
    })
    .collect()
}

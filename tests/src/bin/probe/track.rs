//! Commands about trackers.
//!
//! - `tracker [device]`: starts a tracker; `new_tracker`: starts one that may be off; `track`: the latest tracker prints its
//!   change, and the answer contains the same change as data;
//! - `label name dtype shape address`: labels a block. A shape is written like `2x3`, and an address like an argument of `call`;
//! - `labelled name shape`: allocates `f32` in the latest context, through cudarc; `mislabelled`: labels it again with another
//!   shape; `drop_labelled`: frees all of these.

use gpumem::{
    cudarc::{AllocLabelledExt, LabelExt},
    report::{Change, Tracked},
    tracker::MemTracker,
};

use crate::{Probe, Trouble, device, reported};

impl Probe {
    pub(crate) fn track(&mut self, verb: &str, argument: &str) -> Result<Option<String>, Trouble> {
        Ok(Some(match verb {
            "tracker" => {
                let builder = MemTracker::builder();
                let builder = match device(argument)? {
                    Some(device) => builder.device(device),
                    None => builder,
                };
                reported(builder.start().map(|tracker| {
                    self.trackers.push(tracker);
                    "started"
                }))
            }
            "track" => {
                let tracker = self.trackers.last_mut().ok_or("there is no tracker")?;
                data(&gpumem::track!(tracker))
            }
            "label" => {
                let [name, dtype, sizes, address] = argument.split(' ').collect::<Vec<_>>()[..] else {
                    return Err("not of the form name dtype shape address".into());
                };
                let address = self.names.value(address)?;
                reported(gpumem::tracker::label(name, &shape(sizes)?, dtype, address).map(|()| "done"))
            }
            "labelled" => {
                let (name, sizes) = argument.split_once(' ').ok_or("not of the form name shape")?;
                let stream = self.streams.last().ok_or("there is no context")?;
                self.labelled.push(stream.alloc_labelled(name, &shape(sizes)?)?);
                "allocated".to_owned()
            }
            "mislabelled" => {
                let slice = self.labelled.pop().ok_or("nothing is labelled")?;
                let answer = reported(slice.label("wrong", &[slice.len(), 2]).map(|()| "done"));
                self.labelled.push(slice.labelled("wrong", &[7]));
                answer
            }
            _ => return Ok(None),
        }))
    }
}

fn shape(sizes: &str) -> Result<Vec<usize>, Trouble> {
    Ok(sizes.split('x').map(str::parse).collect::<Result<_, _>>()?)
}

fn data(tracked: &Tracked) -> String {
    let bytes = |bytes: Option<gpumem::Bytes>| bytes.map_or_else(|| "?".to_owned(), |bytes| bytes.to_string());
    let change = |change: &Change| {
        let Change { count, each, kind, dtype, shape, names, .. } = change;
        let label = dtype.as_ref().zip(shape.as_ref());
        let label = label.map(|(dtype, shape)| format!(" {dtype} {shape:?} {names:?}")).unwrap_or_default();
        format!(", {count:+} * {} {kind}{label}", each.get())
    };
    let changes = tracked.changes.as_ref().map_or_else(|| ", ?".to_owned(), |all| all.iter().map(change).collect());
    let lost = if tracked.lost > 0 { format!(", {} lost", tracked.lost) } else { String::new() };
    format!("used={} live={}{changes}{lost}", bytes(tracked.used), bytes(tracked.live))
}

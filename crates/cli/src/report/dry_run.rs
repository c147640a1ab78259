//! What a dry run did not compute.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use gpumem_core::{
    derive::Names,
    model::{Bytes, torch_operation},
    report::counted,
};
use gpumem_driver::settings::smallest_card;
use serde::Serialize;

use crate::history::{History, RejectedRequest, UnknownValue};

/// At most this many places are listed in JSON, those of the first values.
const MOST: usize = 1_000;

/// How far the figures of a dry run hold. The field names are those in JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DryRunOverview {
    /// The size up to which blocks were real. `None` if it was not recorded.
    pub(crate) real_bytes: Option<u64>,
    /// The memory of a GPU on which the process gets all that it requested, with the driver's own memory. The largest of its devices.
    pub(crate) needed_bytes: Option<u64>,
    /// The number of times that the program read a value that was not computed.
    pub(crate) unknown_values: u64,
    /// Where it read them, in the order of the first values.
    pub(crate) places: Vec<UnknownPlace>,
}

/// A place that read unknown values.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct UnknownPlace {
    pub(crate) place: String,
    pub(crate) caller: Option<String>,
    /// The operation of PyTorch that read them.
    pub(crate) operation: Option<String>,
    pub(crate) count: u64,
    pub(crate) bytes: u64,
    /// The time of the first value.
    pub(crate) seconds: f64,
}

impl DryRunOverview {
    /// Returns `None` if the recording is not of a dry run, or if the run allocated nothing. `needed` is the memory of the GPU that the process
    /// needs.
    pub(crate) fn of(history: &History, needed: Option<u64>) -> Option<Self> {
        if history.real_blocks.is_none() && history.unknown_values.is_empty() {
            return None;
        }
        let mut places: Vec<UnknownPlace> = Vec::new();
        let mut known = HashMap::new();
        for UnknownValue { time, bytes, stack } in &history.unknown_values {
            let at = *known.entry(*stack).or_insert_with(|| {
                let frames = history.definitions().frames(*stack);
                let operation = torch_operation(&frames).map(|name| format!("aten::{name}"));
                let stack = history.definitions().stack(*stack);
                let place = stack.line.or(stack.library).unwrap_or_else(|| "a place without a stack".to_owned());
                let is_same = |known: &UnknownPlace| {
                    known.place == place && known.caller == stack.caller && known.operation == operation
                };
                places.iter().position(is_same).unwrap_or_else(|| {
                    let seconds = Duration::from_nanos(*time).as_secs_f64();
                    let (caller, count, bytes) = (stack.caller, 0, 0);
                    places.push(UnknownPlace { place, caller, operation, count, bytes, seconds });
                    places.len() - 1
                })
            });
            places[at].count += 1;
            places[at].bytes = places[at].bytes.saturating_add(*bytes);
        }
        places.truncate(MOST);
        let is_missed = |rejected: &RejectedRequest| !rejected.was_obtained;
        Some(Self {
            real_bytes: history.real_blocks,
            needed_bytes: needed.filter(|_| !history.rejections.iter().any(is_missed)),
            unknown_values: history.unknown_values.len() as u64,
            places,
        })
    }

    /// Returns the values of several processes together. `None` if none of them is of a dry run.
    pub(crate) fn together<'a>(all: impl IntoIterator<Item = &'a Self>) -> Option<Self> {
        all.into_iter().cloned().reduce(|mut sum, one| {
            sum.unknown_values += one.unknown_values;
            sum.needed_bytes = None;
            sum.places.extend(one.places);
            sum
        })
    }

    /// Returns the sentence about the values, with which a report of a dry run ends.
    pub(crate) fn in_words(&self) -> String {
        let Some(first) = self.places.first() else {
            return "no value was read from memory that is not there".to_owned();
        };
        let values = counted(self.unknown_values, "value was", "values were");
        let caller = first.caller.as_ref().map(|caller| format!("called from {caller}"));
        let details: Vec<_> = first.operation.clone().into_iter().chain(caller).collect();
        let details = if details.is_empty() { String::new() } else { format!(" ({})", details.join(", ")) };
        let different: HashSet<_> = self.places.iter().map(|at| (&at.place, &at.caller, &at.operation)).collect();
        let places = if different.len() > 1 { format!("at {} places, ", different.len()) } else { String::new() };
        format!(
            "{values} read from memory that is not there, {places}first at {}{details}: sizes that depend on them may differ. A larger --real \
             computes more values",
            first.place,
        )
    }

    /// Returns a sentence such as `the process needs a GPU of 4.21 GiB; the smallest known one is RTX 4060 with 7.75 GiB`.
    pub(crate) fn needs_in_words(&self) -> Option<String> {
        let needed = Bytes::new(self.needed_bytes?);
        let known = match smallest_card(needed) {
            Some((name, size)) => format!("the smallest known one is {name} with {size}"),
            None => "no known one is that large".to_owned(),
        };
        Some(format!("the process needs a GPU of {needed}; {known}"))
    }

    /// Returns a text such as `blocks up to 64 MiB were real`.
    pub(crate) fn real_in_words(&self) -> Option<String> {
        self.real_bytes.map(|bytes| format!("blocks up to {} were real", Bytes::new(bytes)))
    }
}

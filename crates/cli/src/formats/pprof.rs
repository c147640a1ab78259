//! Writes the compressed profile of pprof: stacks with their live memory at a moment and with all that they allocated,
//! as in Go's heap profiles.
//!
//! The messages are some of `profile.proto` of github.com/google/pprof.

use std::{
    collections::HashMap,
    io::{self, Write},
};

use flate2::{Compression, write::GzEncoder};
use prost::Message;

use super::frames::{CodeFrame, Indices, held_at, stack};
use crate::history::{History, Moment, OriginSum};

#[derive(Clone, PartialEq, Message)]
struct Profile {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    time_nanos: i64,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
    #[prost(int64, repeated, tag = "13")]
    comment: Vec<i64>,
    #[prost(int64, tag = "14")]
    default_sample_type: i64,
}

#[derive(Clone, PartialEq, Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    r#type: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    /// The functions of the stack, the innermost first.
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    label: Vec<Label>,
}

#[derive(Clone, PartialEq, Message)]
struct Label {
    #[prost(int64, tag = "1")]
    key: i64,
    #[prost(int64, tag = "2")]
    str: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Clone, PartialEq, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
    #[prost(int64, tag = "2")]
    line: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
    #[prost(int64, tag = "3")]
    system_name: i64,
    #[prost(int64, tag = "4")]
    filename: i64,
}

#[derive(Default)]
struct Strings(Indices<String>);

impl Strings {
    fn index(&mut self, text: &str) -> i64 {
        self.0.get_or_insert(&text.to_owned()).try_into().unwrap_or(i64::MAX)
    }
}

/// The live blocks and bytes, and the blocks and bytes that were ever allocated.
type Values = [i64; 4];

pub(super) fn write(history: &History, moment: Moment, is_folded: bool, out: &mut dyn Write) -> io::Result<()> {
    let mut strings = Strings::default();
    // The first text must be empty.
    strings.index("");
    let mut frames = Indices::<CodeFrame>::default();
    let mut samples = Vec::new();
    for ((device, origin), value) in values(history, moment) {
        let origin = &history.origins[origin];
        let known = [
            ("device", history.devices[usize::from(device)].device.to_string()),
            ("kind", origin.kind.name().to_owned()),
            ("library", origin.library_or_program()),
        ];
        samples.push(Sample {
            // Ids start at 1.
            location_id: stack(history, origin, is_folded)
                .iter()
                .rev()
                .map(|frame| frames.get_or_insert(frame) as u64 + 1)
                .collect(),
            value: value[..if history.has_only_peaks() { 2 } else { 4 }].to_vec(),
            label: known.map(|(key, text)| Label { key: strings.index(key), str: strings.index(&text) }).to_vec(),
        });
    }
    let (mut location, mut function) = (Vec::new(), Vec::new());
    let mut functions = Indices::<(String, String)>::default();
    for (id, frame) in (1_u64..).zip(&frames.all) {
        let before = functions.all.len();
        let index = functions.get_or_insert(&(frame.function.clone(), frame.file.clone()));
        let function_id = index as u64 + 1;
        if index == before {
            let (name, filename) = (strings.index(&frame.function), strings.index(&frame.file));
            function.push(Function { id: function_id, name, system_name: name, filename });
        }
        location.push(Location { id, line: vec![Line { function_id, line: frame.line.into() }] });
    }
    let process = history.definitions().process();
    let nanos = |time: std::time::Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
    let types =
        [("inuse_objects", "count"), ("inuse_space", "bytes"), ("alloc_objects", "count"), ("alloc_space", "bytes")];
    // A recording of the peaks does not contain all allocations.
    let types = if history.has_only_peaks() { &types[..2] } else { &types };
    let profile = Profile {
        sample_type: types
            .iter()
            .map(|(name, unit)| ValueType { r#type: strings.index(name), unit: strings.index(unit) })
            .collect(),
        sample: samples,
        location,
        function,
        time_nanos: nanos(process.started),
        duration_nanos: nanos(history.end),
        comment: vec![strings.index(&format!("gpumem: live at {moment} of {}", history.path.display()))],
        default_sample_type: strings.index("inuse_space"),
        string_table: Vec::new(),
    };
    let profile = Profile { string_table: strings.0.all, ..profile };
    let mut compressed = GzEncoder::new(out, Compression::fast());
    compressed.write_all(&profile.encode_to_vec())?;
    compressed.finish()?;
    Ok(())
}

/// Returns the samples by device and origin, those with the most bytes first.
fn values(history: &History, moment: Moment) -> Vec<((u16, usize), Values)> {
    let number: HashMap<*const crate::history::Origin, usize> =
        history.origins.iter().enumerate().map(|(at, origin)| (std::ptr::from_ref(origin), at)).collect();
    let mut values: HashMap<(u16, usize), Values> = HashMap::new();
    let mut add = |held: &[OriginSum<'_>], at: usize| {
        for held in held {
            let of = values.entry((held.device, number[&std::ptr::from_ref(held.origin)])).or_default();
            of[at] += held.blocks;
            of[at + 1] += held.bytes;
        }
    };
    add(&held_at(history, moment), 0);
    if !history.has_only_peaks() {
        add(&history.allocated(), 2);
    }
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by_key(|(of, value)| (std::cmp::Reverse(value[1]), *of));
    values
}

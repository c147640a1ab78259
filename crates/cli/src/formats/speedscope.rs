//! The file format of speedscope: a profile for each device, with a sample for each stack.

use std::io::{self, Write};

use serde::Serialize;

use super::frames::{CodeFrame, Numbers, held_at, stack};
use crate::{
    history::{History, Moment},
    report::json::write_line,
};

#[derive(Serialize)]
struct File {
    #[serde(rename = "$schema")]
    schema: &'static str,
    exporter: &'static str,
    name: String,
    #[serde(rename = "activeProfileIndex")]
    active: u32,
    shared: Shared,
    profiles: Vec<Profile>,
}

#[derive(Serialize)]
struct Shared {
    frames: Vec<NamedFrame>,
}

#[derive(Serialize)]
struct NamedFrame {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u32>,
}

#[derive(Serialize)]
struct Profile {
    r#type: &'static str,
    name: String,
    unit: &'static str,
    #[serde(rename = "startValue")]
    start: i64,
    #[serde(rename = "endValue")]
    end: i64,
    /// The frames of each stack.
    samples: Vec<Vec<usize>>,
    weights: Vec<i64>,
}

pub(super) fn write(history: &History, moment: Moment, is_folded: bool, out: &mut dyn Write) -> io::Result<()> {
    let mut frames = Numbers::<CodeFrame>::default();
    let held = held_at(history, moment);
    let mut profiles = Vec::new();
    for (number, device) in (0_u16..).zip(&history.devices) {
        let of_device = held.iter().filter(|held| held.device == number && held.bytes > 0);
        let (mut samples, mut weights, mut sum) = (Vec::new(), Vec::new(), 0);
        for held in of_device {
            samples.push(stack(history, held.origin, is_folded).iter().map(|frame| frames.of(frame)).collect());
            weights.push(held.bytes);
            sum += held.bytes;
        }
        profiles.push(Profile {
            r#type: "sampled",
            name: format!("{}: live at {moment}", device.device),
            unit: "bytes",
            start: 0,
            end: sum,
            samples,
            weights,
        });
    }
    let frame = |CodeFrame { function, file, line }: CodeFrame| NamedFrame {
        name: function,
        file: Some(file).filter(|file| !file.is_empty()),
        line: Some(line).filter(|line| *line > 0),
    };
    let file = File {
        schema: "https://www.speedscope.app/file-format-schema.json",
        exporter: concat!("gpumem ", env!("CARGO_PKG_VERSION")),
        name: history.path.display().to_string(),
        active: 0,
        shared: Shared { frames: frames.all.into_iter().map(frame).collect() },
        profiles,
    };
    write_line(&file, out)
}

//! The file format of speedscope: a profile for each device, with a sample for each stack.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::frames::{CodeFrame, Numbers, held_at, stack};
use crate::{
    history::{History, Moment},
    report::json::write_line,
};

pub(super) fn write(history: &History, moment: Moment, out: &mut dyn Write) -> io::Result<()> {
    let mut frames = Numbers::<CodeFrame>::default();
    let held = held_at(history, moment);
    let mut profiles = Vec::new();
    for (number, device) in (0_u16..).zip(&history.devices) {
        let of_device = held.iter().filter(|held| held.device == number && held.bytes > 0);
        let (mut samples, mut weights, mut sum) = (Vec::new(), Vec::new(), 0);
        for held in of_device {
            samples.push(stack(history, held.origin).iter().map(|frame| frames.of(frame)).collect::<Vec<_>>());
            weights.push(held.bytes);
            sum += held.bytes;
        }
        profiles.push(json!({
            "type": "sampled",
            "name": format!("{}: live at {moment}", device.device),
            "unit": "bytes",
            "startValue": 0,
            "endValue": sum,
            "samples": samples,
            "weights": weights,
        }));
    }
    let frame = |frame: &CodeFrame| {
        let mut known = json!({ "name": frame.function });
        if !frame.file.is_empty() {
            known["file"] = Value::from(frame.file.clone());
        }
        if frame.line > 0 {
            known["line"] = Value::from(frame.line);
        }
        known
    };
    let file = json!({
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": concat!("gpumem ", env!("CARGO_PKG_VERSION")),
        "name": history.path.display().to_string(),
        "activeProfileIndex": 0,
        "shared": { "frames": frames.all.iter().map(frame).collect::<Vec<_>>() },
        "profiles": profiles,
    });
    write_line(&file, out)
}

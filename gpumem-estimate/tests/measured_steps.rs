//! Estimates against the steps that `measure/steps.py` measured on an H200: `docs/VERIFIED.md` has the table. `cargo test --test
//! measured_steps -- --nocapture` prints them.

use std::collections::BTreeMap;

use gpumem_estimate::{Model, Step, models};
use serde_json::Value;

fn model(name: &str) -> Model {
    match name {
        "gpt2" => models::gpt2(512),
        "gpt2-medium" => models::gpt2_medium(512),
        "llama-1b" => models::llama_1b(256),
        "resnet50" => models::resnet50(),
        "vgg19" => models::vgg19(),
        name => panic!("there is no builder for {name}"),
    }
}

#[test]
fn estimates_of_steps_agree_with_an_h200() {
    // A row of several ranks has the peak of the one that needs most.
    let mut peaks: BTreeMap<String, (Value, Option<u64>)> = BTreeMap::new();
    for line in include_str!("../measure/steps.jsonl").lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let name = row["row"].as_str().unwrap().to_owned();
        let peak = row["peak"].as_u64();
        let known = peaks.entry(name).or_insert((row, peak));
        known.1 = known.1.max(peak);
    }
    let (mut near, mut wrong) = (0, Vec::new());
    for (name, (row, peak)) in &peaks {
        let step: Step = serde_json::from_value(row["step"].clone()).unwrap();
        let estimate = step.estimate(&model(row["model"].as_str().unwrap()));
        let Some(measured) = *peak else {
            // PyTorch refuses this step, and so does the estimate.
            assert!(row["error"].as_str().unwrap().contains("modified by an inplace operation"), "{row}");
            assert!(estimate.is_err(), "{name}");
            continue;
        };
        let estimate = estimate.unwrap();
        let low = estimate.peak.get();
        // With convolutions the truth is in a range.
        let high = estimate.convolutions.as_ref().map_or(low, |with| with.peak.get());
        println!("{name}: {low} to {high} estimated, {measured} measured");
        let distance = if measured < low { low - measured } else { measured.saturating_sub(high) };
        near += usize::from(distance * 20 <= measured);
        if distance * 10 > measured {
            wrong.push(format!("{name}: {low} to {high} instead of {measured}"));
        }
    }
    assert_eq!((peaks.len(), near, wrong), (36, 35, Vec::new()));
}

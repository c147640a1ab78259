//! This target reads Hugging Face's `config.json`. A model that can be estimated can also be counted.

#![no_main]

use gpumem_estimate::{Dtype, Model, Optimizer, Step};
use libfuzzer_sys::fuzz_target;

mod seeds;

/// Models with more parameters take too long to be estimated for each input.
const MOST: usize = 200;

fuzz_target!(init: write_seeds(), |data: &[u8]| {
    let Some((length, text)) = data.split_first() else { return };
    let Ok(text) = str::from_utf8(text) else { return };
    // The sequences have 0 to 15 tokens, or very many.
    let length = if *length < 128 { u64::from(length % 16) } else { u64::MAX >> (length % 64) };
    let Ok(model) = Model::from_config(text, length) else { return };
    let parameters = model.parameters(Dtype::F32);
    if parameters.as_ref().is_ok_and(|all| all.all().len() > MOST) {
        return;
    }
    let estimate = Step::training(2, Optimizer::Adam).estimate(&model);
    assert!(estimate.is_err() || parameters.is_ok(), "what can be estimated can be counted");
});

fn write_seeds() {
    let lines = seeds::json_lines("crates/estimate/tests/modules.jsonl");
    let small = lines.iter().filter(|line| line["modules"].is_object());
    seeds::write("config", small.map(|line| format!("\u{10}{}", line["config"]).into_bytes()));
}

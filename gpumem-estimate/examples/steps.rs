//! Prints the estimates of the rows that `measure/steps.py` measures. The argument is a file of them: each line has a `row`, a `model`
//! and a `step`; with a measured `peak`, the difference is printed as well.

use gpumem_estimate::{Model, Step, models};
use serde_json::Value;

fn model(name: &str) -> Option<Model> {
    Some(match name {
        "gpt2" => models::gpt2(512),
        "gpt2-medium" => models::gpt2_medium(512),
        "llama-1b" => models::llama_1b(256),
        "resnet50" => models::resnet50(),
        "vgg19" => models::vgg19(),
        _ => return None,
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args().nth(1).ok_or("the argument is a file of rows")?;
    for line in std::fs::read_to_string(file)?.lines() {
        let row: Value = serde_json::from_str(line)?;
        let name = row["row"].as_str().ok_or("a row has a name")?;
        let model = row["model"].as_str().and_then(model).ok_or("a row has a model")?;
        let step: Step = serde_json::from_value(row["step"].clone())?;
        let estimate = match step.estimate(&model) {
            Ok(estimate) => estimate,
            Err(error) => {
                println!("{name}\t{error}");
                continue;
            }
        };
        let peak = estimate.peak.get();
        let phases: Vec<_> =
            estimate.phases.iter().map(|phase| format!("{} {}", phase.name, phase.peak.get())).collect();
        let difference = row["peak"].as_f64().map(|measured| {
            #[expect(clippy::cast_precision_loss, reason = "percentages need no more")]
            let estimated = peak as f64;
            format!("{:+.2} %", 100.0 * (estimated - measured) / measured)
        });
        println!("{name}\t{peak}\t{}\t{}", difference.unwrap_or_default(), phases.join(", "));
    }
    Ok(())
}

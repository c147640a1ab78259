//! Prints the estimates of the rows that `measure/architectures.py` measures, and what was measured if the file has it:
//! `cargo run --example architectures < rows.jsonl`.

use std::io::{self, BufRead};

use gpumem_estimate::{Dtype, Model, Optimizer, Step};
use serde_json::Value;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for line in io::stdin().lock().lines() {
        let row: Value = serde_json::from_str(&line?)?;
        let Some(name) = row["name"].as_str() else { continue };
        let number = |key: &str| row[key].as_u64();
        let text = |key: &str| row[key].as_str().unwrap_or_default();
        let model = Model::from_config(&row["config"].to_string(), number("length").unwrap_or(0))?;
        let step = Step {
            batch: number("batch").unwrap_or(1),
            optimizer: (text("mode") == "adamw").then_some(Optimizer::Adam),
            parameters: if text("dtype") == "bf16" { Dtype::Bf16 } else { Dtype::F32 },
            ..Step::default()
        };
        let estimate = step.estimate(&model)?;
        let peak = estimate.peak.get();
        let name = format!("{name}/{}/{}", text("mode"), text("dtype"));
        let phases: Vec<_> =
            estimate.phases.iter().map(|phase| format!("{} {}", phase.name, phase.peak.get())).collect();
        match number("peak") {
            #[expect(clippy::cast_precision_loss, reason = "percentages need no more")]
            Some(measured) => {
                let error = (peak as f64 / measured as f64 - 1.0) * 100.0;
                let found: Vec<_> = row["phases"].as_array().into_iter().flatten().map(Value::to_string).collect();
                println!("{name}: {peak} estimated, {measured} measured, {error:+.2} %");
                println!("    {}\n    {}", phases.join(", "), found.join(", "));
            }
            None => println!("{name}: {peak}"),
        }
    }
    Ok(())
}

//! Prints the estimates of the rows that `measure/measure.py` measures: one JSON object for each row. Arguments: parts of the names
//! of rows; without arguments, all rows that can be estimated.

use gpumem_estimate::{Dtype, Model, Optimizer, Step, models};
use serde_json::json;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let models: [(&str, Model); 10] = [
        ("gpt2", models::gpt2(512)),
        ("gpt2-medium", models::gpt2_medium(512)),
        ("llama-1b", models::llama_1b(256)),
        ("bert-base", models::bert_base(256)),
        ("t5-small", models::t5_small([256, 128])),
        ("vit-b", models::vit_b_16()),
        ("vgg19", models::vgg19()),
        ("resnet50", models::resnet50()),
        ("convnext_tiny", models::convnext("convnext_tiny", [3, 3, 9, 3], [96, 192, 384, 768])),
        ("mobilenet_v2", models::mobilenet_v2()),
    ];
    for (position, (name, model)) in models.iter().enumerate() {
        for batch in [1, 8, 32] {
            for (mode, optimizer) in
                [("inference", None), ("sgd", Some(Optimizer::Sgd)), ("adamw", Some(Optimizer::Adam))]
            {
                for (precision, autocast) in [("fp32", None), ("bf16", Some(Dtype::Bf16))] {
                    for checkpointing in [false, true] {
                        // The first six are transformers.
                        if checkpointing && (optimizer.is_none() || position >= 6) {
                            continue;
                        }
                        let suffix = if checkpointing { "/checkpointing" } else { "" };
                        let row = format!("{name}/{batch}/{mode}/{precision}{suffix}");
                        if !wanted.is_empty() && !wanted.iter().any(|part| row.contains(part.as_str())) {
                            continue;
                        }
                        let step =
                            Step { batch, optimizer, autocast, checkpointing: checkpointing.into(), ..Step::default() };
                        let estimate = step.estimate(model)?;
                        let classes: Vec<_> =
                            estimate.classes().iter().map(|(class, bytes)| (class.name(), bytes.get())).collect();
                        let phases: Vec<_> =
                            estimate.phases.iter().map(|phase| (phase.name, phase.peak.get())).collect();
                        let (peak, reserved) = (estimate.peak.get(), estimate.reserved.get());
                        let workspace = estimate.convolutions.map(|workspace| {
                            json!({"high": workspace.high.get(), "peak": workspace.peak.get(), "reserved": workspace.reserved.get()})
                        });
                        println!(
                            "{}",
                            json!({"row": row, "peak": peak, "reserved": reserved, "classes": classes, "phases": phases, "convolutions": workspace})
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

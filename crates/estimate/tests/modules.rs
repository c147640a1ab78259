//! Checks that models have the same modules as in torchvision and transformers. `measure/models.py` wrote `modules.jsonl`: its first
//! line has the versions, and each other line has a model and its parameters, or those of each module.

use std::collections::BTreeMap;

use gpumem_estimate::{Dtype, Model, Optimizer, Step, models};
use serde_json::Value;

fn lines() -> impl Iterator<Item = Value> {
    include_str!("modules.jsonl").lines().skip(1).map(|line| serde_json::from_str(line).expect("a line of JSON"))
}

#[test]
fn models_have_the_modules_of_their_libraries() {
    let mut count = 0;
    for line in lines() {
        let name = line["name"].as_str().unwrap();
        let config = line.get("config").map(|config| Model::from_config(&config.to_string(), 16));
        let model = config.unwrap_or_else(|| Ok(models::torchvision(name).expect("a name in torchvision")));
        let model = model.unwrap_or_else(|error| panic!("{name}: {error}"));
        let parameters = model.parameters(Dtype::Bf16).unwrap_or_else(|error| panic!("{name}: {error}"));
        if let Some(modules) = line["modules"].as_object() {
            let expected: BTreeMap<_, _> =
                modules.iter().map(|(name, size)| (name.clone(), size.as_u64().unwrap())).collect();
            let found: BTreeMap<_, _> =
                parameters.by_module(usize::MAX).into_iter().map(|(name, sum)| (name, sum.elements)).collect();
            assert_eq!(found, expected, "{name}");
        }
        let sum = parameters.sum();
        assert_eq!((Some(sum.elements), sum.bytes.get()), (line["parameters"].as_u64(), 2 * sum.elements), "{name}");
        count += 1;
    }
    assert!(count >= 108, "{count} models");
}

/// Each model runs, a training step makes a gradient for each parameter that is used, and the model can be written and read back.
#[test]
fn models_run() {
    for line in lines().filter(|line| line["modules"].is_object()) {
        let name = line["name"].as_str().unwrap();
        let model = Model::from_config(&line["config"].to_string(), 16).unwrap();
        assert_eq!(Model::from_json(&model.to_json().unwrap()).unwrap(), model, "{name}");
        let failed = |error| panic!("{name}: {error}");
        let inference = Step::inference(2).estimate(&model).unwrap_or_else(failed);
        let training = Step::training(2, Optimizer::Sgd).estimate(&model).unwrap_or_else(failed);
        assert!(training.peak > inference.peak, "{name}");
        let bf16 =
            Step { autocast: Some(Dtype::Bf16), checkpointing: true.into(), ..Step::training(2, Optimizer::Adam) };
        bf16.estimate(&model).unwrap_or_else(failed);
        let pure = Step { parameters: Dtype::Bf16, ..Step::training(2, Optimizer::Adam) };
        pure.estimate(&model).unwrap_or_else(failed);
    }
}

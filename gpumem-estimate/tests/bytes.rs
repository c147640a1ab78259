//! Estimates against the bytes that `measure/bytes.py models` counted with PyTorch on a CPU.

use gpumem_estimate::{AllocatorKind, Checkpointing, Model, Step};
use serde_json::Value;

/// What an estimate may differ, in parts of a thousand: most differ by less than one, Adafactor's update by nine. A CPU has other
/// kernels than a GPU, which need other small tensors.
const THOUSANDTHS: u64 = 10;

#[test]
fn steps_agree_with_pytorch_on_a_cpu() {
    let mut wrong = Vec::new();
    for line in include_str!("../measure/bytes.jsonl").lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let length = row["length"].as_u64().unwrap();
        let model = Model::from_config(&row["config"].to_string(), length).unwrap();
        let step: Step = serde_json::from_value(row["step"].clone()).unwrap();
        let step = Step { allocator: AllocatorKind::Exact, cublas_workspace: 0, ..step };
        let estimate = step.estimate(&model).unwrap();
        let mut phases = estimate.phases.iter();
        for phase in row["phases"].as_array().unwrap() {
            let (name, counted) = (phase[0].as_str().unwrap(), phase[1].as_u64().unwrap());
            let estimated = phases.next().unwrap();
            assert_eq!(estimated.name, name);
            // What checkpointing keeps for nodes that no gradient reached lives as long as the loss: until the next step.
            let is_left = name == "update" && step.checkpointing == Checkpointing::Blocks;
            let estimated = estimated.peak.get();
            if !is_left && estimated.abs_diff(counted) * 1000 > counted * THOUSANDTHS {
                wrong.push(format!("{}, {name}: {estimated} instead of {counted}", row["row"]));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

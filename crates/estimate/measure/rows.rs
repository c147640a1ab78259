//! The rows that `measure.py` measures, as models and steps. The example `rows` and the test `measured` share this file.

use std::sync::LazyLock;

use gpumem_estimate::{Input, Model, Shape, Step, models};
use serde_json::Value;

/// The models of transformers by name, with their configurations.
static KNOWN: LazyLock<Vec<Value>> = LazyLock::new(|| read(include_str!("../tests/modules.jsonl")));

/// Reads JSON objects, one a line.
pub(crate) fn read(lines: &str) -> Vec<Value> {
    lines.lines().map(|line| serde_json::from_str(line).expect("an object")).collect()
}

/// Returns the model and the step of a row.
pub(crate) fn parse(row: &Value) -> (Model, Step) {
    let size = |name: &str| row["shape"][name].as_u64();
    let length = size("sequence").or(size("source")).unwrap_or(0);
    let name = row["model"].as_str().unwrap_or_default();
    let config = KNOWN.iter().find(|line| line["name"] == name).unwrap_or(row).get("config");
    let model = config.map(|config| Model::from_config(&config.to_string(), length).expect("a known architecture"));
    let mut model = model.or_else(|| models::torchvision(name)).expect("a model of torchvision or of `modules.jsonl`");
    if let (Input::Numbers(_), Some(image)) = (&model.input, size("image")) {
        model.input = Input::Numbers(Shape::from([3, image, image]));
    }
    if let Some((source, target)) = size("source").zip(size("target")) {
        model.input = Input::Pair { source, target };
    }
    (model, serde_json::from_value(row["step"].clone()).expect("a step"))
}

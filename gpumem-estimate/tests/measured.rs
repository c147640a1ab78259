//! Estimates against the rows that `measure/measure.py` measured on an H200. `docs/ESTIMATE.md` says how rows were chosen.

use gpumem_estimate::Class;
use serde_json::Value;

#[path = "../measure/rows.rs"]
mod rows;

struct Row {
    name: String,
    chosen: String,
    /// In percent of the measured peak.
    error: f64,
}

/// The difference between an estimate and the measured peak. For convolution models, both without the workspaces of libraries.
fn compared(row: &Value) -> Row {
    let text = |key: &str| row[key].as_str().expect("a text");
    let (model, step) = rows::parse(text("row")).expect("a row that `rows` knows");
    let estimate = step.estimate(&model).expect("the model fits together");
    assert_eq!(Some(estimate.parameters), row["parameters"].as_u64(), "{}", text("row"));
    let workspace = estimate
        .classes()
        .iter()
        .filter(|(class, _)| *class == Class::Workspace)
        .map(|(_, bytes)| bytes.get())
        .sum::<u64>();
    let has_convolutions = ["vgg19", "resnet50", "convnext_tiny", "mobilenet_v2"].contains(&text("model"));
    let (key, estimated) = if has_convolutions {
        ("peak_without_workspace", estimate.peak.get() - workspace)
    } else {
        ("peak", estimate.peak.get())
    };
    #[expect(clippy::cast_precision_loss, reason = "percentages need no more")]
    let (estimated, measured) = (estimated as f64, row[key].as_u64().expect("a number") as f64);
    let error = 100.0 * (estimated - measured) / measured;
    Row { name: text("row").to_owned(), chosen: text("chosen").to_owned(), error }
}

#[test]
fn estimates_agree_with_an_h200() {
    let lines = include_str!("../measure/h200.jsonl").lines();
    let rows: Vec<Value> = lines.map(|line| serde_json::from_str(line).expect("a row")).collect();
    let compared: Vec<_> = rows.iter().map(compared).collect();
    assert_eq!((rows.len(), compared.len()), (252, 252));
    for chosen in ["before", "after"] {
        let of_kind: Vec<_> = compared.iter().filter(|row| row.chosen == chosen).collect();
        let near = of_kind.iter().filter(|row| row.error.abs() <= 5.0).count();
        assert!(10 * near >= 9 * of_kind.len(), "{near} of {} rows chosen {chosen}", of_kind.len());
        for row in of_kind {
            assert!(row.error.abs() <= 10.0, "{}: {:+.2} %", row.name, row.error);
        }
    }
}

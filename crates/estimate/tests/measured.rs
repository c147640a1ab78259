//! Compares estimates with the values that the programs in `measure/` measured on an H200 or counted with PyTorch.
//! `docs/ESTIMATE.md` describes how the rows were chosen. `cargo test -p gpumem-estimate measured -- --nocapture` prints the
//! estimates.

use gpumem_core::model::Bytes;
use gpumem_estimate::{AllocatorKind, Checkpointing, Class, ContextSize, Estimate, Step};
use serde_json::{Value, json};

#[path = "../measure/rows.rs"]
mod rows;

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().expect("a text")
}

fn number(row: &Value, key: &str) -> u64 {
    row[key].as_u64().expect("a number")
}

/// Returns by how many percent an estimate exceeds the measured value.
#[expect(clippy::cast_precision_loss, reason = "percentages need no more")]
fn percent(estimated: u64, measured: u64) -> f64 {
    (estimated as f64 / measured as f64 - 1.0) * 100.0
}

/// Returns whether most operations of the model are convolutions.
fn has_convolutions(row: &Value) -> bool {
    row["shape"]["image"].is_u64() && !text(row, "model").starts_with("vit")
}

/// Returns the difference between an estimate and the measured peak, in percent. For models of convolutions, both are without the
/// workspaces of libraries if those were measured; otherwise the estimate is a range.
fn error(row: &Value, estimate: &Estimate) -> f64 {
    let (low, measured) = (estimate.peak.get(), number(row, "peak"));
    match row["peak_without_workspace"].as_u64().filter(|_| has_convolutions(row)) {
        Some(measured) => {
            let classes = estimate.classes();
            let workspace =
                classes.iter().find(|(class, _)| *class == Class::Workspace).map_or(0, |(_, bytes)| bytes.get());
            percent(low - workspace, measured)
        }
        None if has_convolutions(row) => {
            let high = estimate.convolutions.map_or(low, |range| range.peak.get());
            percent(measured.clamp(low, high), measured)
        }
        None => percent(low, measured),
    }
}

/// Checks that the largest workspace is inside its range, and that the peak is inside the range of peaks. The peak may be 0.4 %
/// outside, because blocks may have other addresses.
fn check_workspaces(row: &Value, estimate: &Estimate) {
    let name = text(row, "row");
    let range = estimate.convolutions.expect("the model has convolutions");
    let of_matrix_products = 32 << 20;
    assert!(number(row, "largest_workspace") <= range.high.get().max(of_matrix_products), "{name}");
    let peak = number(row, "peak");
    let allowed = peak / 250;
    assert!(estimate.peak.get() <= peak + allowed, "{name}: at least {} and {peak}", estimate.peak);
    assert!(range.peak.get() + allowed >= peak, "{name}: at most {} and {peak}", range.peak);
}

/// Checks that the estimate of each row of a file differs from the measured peak by at most this percentage. Returns the rows with
/// their estimates. Of the ranks of a row, the one with the highest peak counts.
fn check(lines: &str, allowed: impl Fn(&str) -> f64) -> Vec<(Value, Estimate)> {
    let mut rows: Vec<Value> = Vec::new();
    for row in rows::read(lines) {
        match rows.iter_mut().find(|known| known["row"] == row["row"]) {
            Some(known) if number(known, "peak") >= number(&row, "peak") => {}
            Some(known) => *known = row,
            None => rows.push(row),
        }
    }
    let estimated = rows.into_iter().map(|row| {
        let name = text(&row, "row");
        let (model, step) = rows::parse(&row);
        let estimate = step.estimate(&model).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(estimate.parameters, number(&row, "parameters"), "{name}");
        if has_convolutions(&row) && row["largest_workspace"].is_u64() {
            check_workspaces(&row, &estimate);
        }
        let error = error(&row, &estimate);
        println!("{name}: {} estimated, {error:+.2} %", estimate.peak);
        assert!(error.abs() <= allowed(name), "{name}: {error:+.2} %");
        (row, estimate)
    });
    estimated.collect()
}

/// Most errors are much smaller. The target was 5 % for nine of ten rows and 10 % for all.
#[test]
fn estimates_agree_with_an_h200() {
    let rows = check(include_str!("../measure/h200.jsonl"), |_| 5.0);
    for chosen in ["before", "after"] {
        assert_eq!(rows.iter().filter(|(row, _)| row["chosen"] == chosen).count(), 126);
    }
}

/// Tests rows whose estimates were committed before the rows were measured. `blind_estimates.jsonl` contains these estimates.
#[test]
fn estimates_agree_with_rows_that_were_measured_last() {
    let committed = rows::read(include_str!("../measure/blind_estimates.jsonl"));
    let rows = check(include_str!("../measure/blind.jsonl"), |_| 3.0);
    assert_eq!((rows.len(), committed.len()), (48, 48));
    for (row, estimate) in rows {
        let before = committed.iter().find(|line| line["row"] == row["row"]).expect("it was estimated before");
        let moved = number(before, "peak").abs_diff(estimate.peak.get());
        assert!(moved <= estimate.peak.get() / 100, "{}: the estimate moved by {moved} B", row["row"]);
    }
}

/// Tests steps with other techniques. `docs/VERIFIED.md` has the results.
#[test]
fn estimates_of_steps_agree_with_an_h200() {
    assert_eq!(check(include_str!("../measure/steps.jsonl"), |_| 5.0).len(), 32);
}

/// Tests architectures of `config.json`. `measure/architectures_first.txt` contains the estimates that were made before the
/// measurement.
#[test]
fn estimates_of_architectures_agree_with_an_h200() {
    let rows = check(include_str!("../measure/architectures.jsonl"), |row| match row {
        // transformers 5.17, with which these rows were measured, does not cap the scores of Gemma 2. The estimate follows 5.23,
        // which does.
        "gemma-2-6/adamw/f32" => 2.0,
        "gemma-2-6/adamw/bf16" => 4.5,
        // The estimate gives the workspace of cuDNN's convolution separately, as a range.
        "clip-vit-base-patch32/inference/bf16" => 3.0,
        _ => 0.5,
    });
    assert_eq!(rows.len(), 60);
}

/// Tests steps whose bytes PyTorch counted on a CPU.
#[test]
fn steps_agree_with_pytorch_on_a_cpu() {
    /// The allowed error of an estimate, in parts of a thousand. Most estimates differ by less than one, and Adafactor's update
    /// by nine. A CPU has other kernels than a GPU, which need other small tensors.
    const THOUSANDTHS: u64 = 10;
    let mut wrong = Vec::new();
    for row in rows::read(include_str!("../measure/bytes.jsonl")) {
        let (model, step) = rows::parse(&row);
        let step = Step { allocator: AllocatorKind::Exact, cublas_workspace: 0, ..step };
        let estimate = step.estimate(&model).expect("PyTorch runs it");
        let mut phases = estimate.phases.iter();
        for phase in row["phases"].as_array().expect("a list") {
            let (name, counted) = (phase[0].as_str().expect("a text"), phase[1].as_u64().expect("a number"));
            let estimated = phases.next().expect("as many phases");
            assert_eq!(estimated.name, name);
            // Tensors that checkpointing keeps for nodes without a gradient live as long as the loss, until the next
            // step.
            let is_left = name == "update" && step.checkpointing == Checkpointing::Blocks;
            let estimated = estimated.peak.get();
            if !is_left && estimated.abs_diff(counted) * 1000 > counted * THOUSANDTHS {
                wrong.push(format!("{}, {name}: {estimated} instead of {counted}", row["row"]));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The sizes of contexts are those that `measure/context.py` measured.
#[test]
fn contexts_have_the_measured_sizes() {
    let rows = rows::read(include_str!("../measure/context.jsonl"));
    let sizes = rows.iter().flat_map(|row| {
        assert_eq!(row["capability"], json!([9, 0]));
        row["beyond"].as_object().expect("stages").values().filter_map(Value::as_u64)
    });
    let sizes: Vec<_> = sizes.map(Bytes::new).collect();
    let context = ContextSize::measured((9, 0)).expect("it was measured");
    assert_eq!(sizes.iter().min(), Some(&context.low));
    assert_eq!(sizes.iter().max(), Some(&context.high));
    assert_eq!(ContextSize::measured((8, 0)), None, "nothing is guessed");
}

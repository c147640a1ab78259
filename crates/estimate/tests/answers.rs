//! Tests the answers of an estimate: text, JSON and the savings of changes.

use gpumem_core::export::{InPaint, Paint};
use gpumem_estimate::{
    AllocatorKind, Bytes, Class, Dtype, Input, Layer, Model, Optimizer, Step, Tensors, models, numbered,
};

use crate::{counted::classifier, files::safetensors};

/// The weights take 1 MiB and 4 KiB, in two layers.
fn small() -> Model {
    let second = Layer::sequence([Layer::relu(false), Layer::linear(512, 2)]);
    classifier(512, vec![Layer::linear(512, 512).named("first"), second.named("second")])
}

fn step() -> Step {
    Step { allocator: AllocatorKind::Exact, cublas_workspace: 0, ..Step::training(64, Optimizer::Momentum) }
}

#[track_caller]
fn assert_text(text: &str, expected: &str) {
    assert_eq!(text, expected, "\n{text}\n");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn an_estimate_is_a_report() {
    let estimate = step().estimate(&small()).unwrap();
    assert_text(
        &estimate.to_string(),
        "\
the estimated peak is 3.268 MiB
                              MiB
 ────────────────────────────────
 peak                       3.268
 the allocator has at most  3.268
 263,682 parameters         1.006

 at the peak, by class    MiB
 ──────────────────────────────────────
 weights                1.006  ████████
 gradients              1.006  ████████
 optimizer              1.006  ████████
 inputs                 0.125  ▉
 activations            0.125  ▉

 at the peak, by layer         MiB
 ───────────────────────────────────────────
 backward                    1.131  ████████
   first                     1.002  ███████
   second.0                  0.125  ▉
   second.1                  0.004  ▏
   (outside of all layers)  <0.001  ▏
 model                       1.006  ███████
   first                     1.002  ███████
   second.1                  0.004  ▏
 update                      1.006  ███████
   first                     1.002  ███████
   second.1                  0.004  ▏
 input                       0.125  ▉
   (outside of all layers)   0.125  ▉
 forward                    <0.001  ▏
   (outside of all layers)  <0.001  ▏

 peak while it runs    MiB
 ───────────────────────────────────
 forward             2.388  █████▊
 backward            3.268  ████████
 update              3.143  ███████▋",
    );
    let coloured = InPaint(&estimate, Paint::ANSI).to_string();
    assert!(coloured.contains("\u{1b}["));
    let (json, peak) = (serde_json::to_value(&estimate).unwrap(), estimate.peak.get());
    assert_eq!((&json["peak"], &json["classes"]["weights"]), (&peak.into(), &estimate.parameter_bytes.get().into()));
    let parts = json["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap());
    assert_eq!((parts.sum::<u64>(), &json["parts"][0]["class"]), (peak, &"weights".into()));
}

#[test]
fn changes_that_are_not_possible_say_why() {
    let savings = step().savings(&small()).unwrap();
    let of = |name: &str| savings.changes.iter().find(|change| change.change == name).unwrap();
    let checkpointing = of("checkpointing of each block");
    assert_eq!(checkpointing.peak, None);
    assert!(checkpointing.why_not.as_ref().unwrap().contains("block"), "{checkpointing:?}");
    assert!(savings.changes.iter().all(|change| change.change != "AdamW with 8 bits"), "it has no Adam");
    let text = savings.to_string();
    // The bars are left out, because their length depends on all rows.
    let bars = [' ', '█', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let first: Vec<_> = text.lines().take(9).map(|line| line.trim_end_matches(bars)).collect();
    assert_text(
        first.join("\n").trim_start(),
        "\
one change                    peak  change      %
                                MiB     MiB
 ───────────────────────────────────────────────────────────
 none                         3.268
 checkpointing of each block      —       —      —
   the model has no blocks that checkpointing could run again
 autocast to bf16             3.643  +0.375  +11.5
   no saving: activations +384 KiB
 parameters in bf16           1.634  -1.634  -50.0",
    );
}

/// Adam keeps two moments. Its update temporarily takes half as much memory.
#[test]
fn the_parts_of_an_optimizer_are_told_apart() {
    let mib = |optimizer, parameters, master_weights| {
        let step = Step { parameters, master_weights, ..Step::training(1, optimizer) };
        let estimate = step.estimate(&models::gpt2(16)).unwrap();
        let parts = estimate.optimizer.map(|parts| [parts.copies, parts.state, parts.temporary]);
        let sum = estimate.classes().into_iter().find(|(class, _)| *class == Class::Optimizer);
        assert_eq!(estimate.optimizer.map(|parts| parts.bytes()), sum.map(|(_, bytes)| bytes));
        (parts.map(|parts| parts.map(|bytes| bytes.get() >> 20)), estimate.to_string())
    };
    let (parts, text) = mib(Optimizer::Adam, Dtype::F32, false);
    assert_eq!(parts, Some([0, 949, 474]));
    let rows: Vec<_> = text.lines().skip_while(|line| !line.starts_with(" optimizer")).take(3).collect();
    let starts = [
        " optimizer                   1424 ",
        "   state                      949 ",
        "   temporary, in the update   475 ",
    ];
    assert!(rows.iter().zip(starts).all(|(row, start)| row.starts_with(start)), "{text}");
    assert_eq!(mib(Optimizer::Adam, Dtype::Bf16, true).0, Some([474, 949, 474]));
    assert_eq!(mib(Optimizer::Momentum, Dtype::F32, false).0, Some([0, 474, 0]));
    assert_eq!(mib(Optimizer::Sgd, Dtype::F32, false).0, None);
}

/// Each row of the savings is the estimate of its step.
#[test]
fn a_change_saves_what_its_step_needs_less() {
    let model = models::gpt2(512);
    let step = Step::training(8, Optimizer::Adam);
    let savings = step.savings(&model).unwrap();
    assert_eq!(savings.peak, step.estimate(&model).unwrap().peak);
    for change in &savings.changes {
        assert_eq!(change.peak, Some(change.step.estimate(&model).unwrap().peak), "{}", change.change);
        // Autocast makes copies that are larger than its savings, because there are few activations.
        assert!(change.peak < Some(savings.peak) || change.change.starts_with("autocast"), "{}", change.change);
        assert_eq!(change.peak >= Some(savings.peak), change.why_not.is_some(), "{change:?}");
    }
    assert!(savings.changes.len() >= 8);
    // If the limit is too low, the table still shows what each change needs.
    let limited = Step { limit: Some(Bytes::mib(100)), ..step };
    assert!(limited.estimate(&model).unwrap_err().is_out_of_memory());
    assert_eq!(limited.savings(&model).unwrap(), savings);
    let inference = Step { parameters: Dtype::Bf16, ..Step::inference(1) }.savings(&model).unwrap();
    let changes: Vec<_> = inference.changes.iter().map(|change| change.change.as_str()).collect();
    assert_eq!(changes, ["weights in 4 bits"]);
}

/// The workspaces of cuDNN are a range. Both of its ends are in the report.
#[test]
fn workspaces_of_convolutions_are_a_range() {
    let estimate = Step::training(32, Optimizer::Sgd).estimate(&models::resnet50()).unwrap();
    let range = estimate.convolutions.unwrap();
    assert!(range.peak > estimate.peak && range.reserved >= estimate.reserved, "{range:?}");
    let text = estimate.to_string();
    assert!(text.contains("\n … with the largest workspaces "), "{text}");
    // The range in the first line, the sentence and all tables have one unit.
    #[expect(clippy::cast_precision_loss, reason = "whole MiB are compared")]
    let mib = |bytes: Bytes| format!("{:.0}", bytes.get() as f64 / f64::from(1 << 20));
    let first = format!("the estimated peak is {} to {} MiB\n", mib(estimate.peak), mib(range.peak));
    assert!(text.starts_with(&first), "{text}");
    assert!(text.contains(&format!("with a workspace of 0 to {} MiB.", mib(range.high))), "{text}");
    assert!(!text.contains("GiB"), "{text}");
    // Only the workspace explains the measured value, 2168 MiB.
    let vgg19 = Step::inference(32).estimate(&models::vgg19()).unwrap();
    let text = vgg19.to_string();
    assert!(text.starts_with("the estimated peak is 1384 to 2184 MiB\n"), "{text}");
}

/// The report of a model with many layers is a page long.
#[test]
fn a_deep_model_has_a_short_report() {
    let of = |sizes: &[u64]| {
        let layers = numbered((0..3000).map(|at| Layer::linear(sizes[at % 2], sizes[(at + 1) % 2])));
        step().estimate(&classifier(8, layers)).unwrap().to_string()
    };
    // These layers differ from the ones before and after them.
    let text = of(&[8, 9]);
    assert!(text.lines().count() < 70, "{text}");
    assert!(text.contains(" more places)"), "{text}");
    let text = of(&[8, 8]);
    assert!(text.lines().count() < 50, "{text}");
    // All 3000 have 8 × 8 weights and 8 biases.
    assert!(text.contains("\n model                      0.824  █\n   0 … 2999 (3000×)         0.824  █\n"), "{text}");
}

#[test]
fn the_longest_sequences_fit_and_longer_ones_do_not() {
    let model = models::gpt2(16);
    let fits = |step: &Step, length: u64| step.estimate(&Model { input: Input::Tokens(length), ..model.clone() });
    let step = Step { limit: Some(Bytes::gib(3)), ..Step::training(2, Optimizer::Sgd) };
    let longest = step.largest_length(&model).unwrap();
    assert!((64..1000).contains(&longest), "{longest}");
    assert!(fits(&step, longest).is_ok());
    for longer in [1, longest.div_ceil(20), longest.div_ceil(10)] {
        assert!(fits(&step, longest + longer).unwrap_err().is_out_of_memory(), "{longest} + {longer}");
    }
    let roomy = Step { limit: Some(Bytes::gib(80)), ..Step::inference(1) };
    assert_eq!(roomy.largest_length(&model).unwrap(), 1024, "the table of positions ends there");
    let error = fits(&roomy, 1025).unwrap_err().to_string();
    assert!(error.ends_with("the table has 1024 positions, and the sequences have 1025 tokens"), "{error}");
    assert!(roomy.largest_length(&small()).unwrap_err().to_string().contains("does not read sequences"));
    let unlimited = Step::inference(1).largest_length(&model).unwrap_err().to_string();
    assert_eq!(unlimited, "the largest step depends on a limit, and the step has none");
}

/// The weights of a file are not an estimate: the other needs of a step are unknown, and not 0.
#[test]
fn weights_without_a_model_are_no_estimate() {
    let header = r#"{"model.layers.0.up.weight":{"dtype":"BF16","shape":[512,512],"data_offsets":[0,524288]},
        "model.layers.1.up.weight":{"dtype":"BF16","shape":[512,512],"data_offsets":[524288,1048576]},
        "norm.scale":{"dtype":"F32","shape":[512],"data_offsets":[1048576,1050624]}}"#;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, safetensors(header, 0)).unwrap();
    assert_text(
        &Tensors::from_safetensors(&file).unwrap().to_string(),
        "\
the weights have 1.002 MiB
                     MiB
 ───────────────────────
 524,800 elements  1.002
 bf16              1.000
 f32               0.002

 by module                  MiB
 ────────────────────────────────────────
 model.layers.0 … 1 (2×)  1.000  ████████
 norm.scale               0.002  ▏
A row with × is the sum of that many equal layers.

activations, gradients, caches and workspaces: unknown.
A file of weights does not describe what a step computes.",
    );
}

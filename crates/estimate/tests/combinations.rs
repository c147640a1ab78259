//! Combines the choices of a step: each gives an estimate whose parts add up, or an error with the reason.

use gpumem_estimate::{
    Checkpointing, DataParallel, DataParallelKind, Decode, Dtype, KvCache, Lora, Model, Optimizer, Quantized, Step,
};

/// A number in mixed radix. Each call returns the next digit.
struct Digits(usize);

impl Digits {
    fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        let choice = choices[self.0 % choices.len()].clone();
        self.0 /= choices.len();
        choice
    }
}

/// The number of steps.
const ALL: usize = 6 * 2 * 2 * 2 * 2 * 2 * 2 * 7 * 2 * 3;

fn step(number: usize) -> Step {
    let mut digits = Digits(number);
    let parallel = |kind, gathered| Some(DataParallel { kind, ranks: 2, gathered });
    let optimizers = [
        None,
        Some(Optimizer::Sgd),
        Some(Optimizer::Adam),
        Some(Optimizer::Adafactor),
        Some(Optimizer::Lion),
        Some(Optimizer::Adam8bit),
    ];
    let data_parallel = [
        None,
        parallel(DataParallelKind::Replicas, None),
        parallel(DataParallelKind::Zero1, None),
        parallel(DataParallelKind::Zero2, None),
        parallel(DataParallelKind::Zero3, None),
        parallel(DataParallelKind::Zero2, Some(Dtype::Bf16)),
        parallel(DataParallelKind::Zero3, Some(Dtype::Bf16)),
    ];
    let lora = Lora { rank: 4, targets: ["q_proj", "mlp.*"].into(), dropout: 0.1 };
    let decode = |cache| Some(Decode { tokens: 3, cache });
    Step {
        batch: 2,
        optimizer: digits.pick(&optimizers),
        parameters: digits.pick(&[Dtype::F32, Dtype::Bf16]),
        master_weights: digits.pick(&[false, true]),
        autocast: digits.pick(&[None, Some(Dtype::Bf16)]),
        checkpointing: digits.pick(&[Checkpointing::Off, Checkpointing::Blocks]),
        adapters: digits.pick(&[None, Some(lora)]),
        quantized: digits.pick(&[None, Some(Quantized::default())]),
        data_parallel: digits.pick(&data_parallel),
        micro_batches: digits.pick(&[1, 2]),
        decode: digits.pick(&[None, decode(KvCache::Dynamic), decode(KvCache::Static(40))]),
        ..Step::default()
    }
}

#[test]
fn parts_add_up_or_an_error_says_why() {
    let config = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}"#;
    let model = Model::from_config(config, 16).unwrap();
    let (mut estimates, mut reasons) = (0, Vec::new());
    // Every 11th step is tested. 11 is prime and divides no number of choices, so all choices meet.
    for number in (0..ALL).step_by(11) {
        let step = step(number);
        let estimate = match step.estimate(&model) {
            Ok(estimate) => estimate,
            Err(error) => {
                assert!(!error.is_out_of_memory() && !error.is_shape_mismatch(), "{step:?}: {error}");
                reasons.push(error.to_string());
                continue;
            }
        };
        estimates += 1;
        let sum: u64 = estimate.parts.iter().map(|part| part.bytes.get()).sum();
        assert_eq!(sum, estimate.peak.get(), "{step:?}");
        assert_eq!(estimate.phases.iter().map(|phase| phase.peak).max(), Some(estimate.peak), "{step:?}");
        assert!(estimate.reserved >= estimate.peak, "{step:?}");
        let json = serde_json::to_string(&step).unwrap();
        assert_eq!(serde_json::from_str::<Step>(&json).unwrap(), step, "{json}");
    }
    reasons.sort();
    reasons.dedup();
    // There are as many reasons as senseless pairs among these choices. No reason names a layer.
    assert!(estimates > 60 && reasons.len() >= 14, "{estimates} estimates, {reasons:#?}");
    assert!(reasons.iter().all(|reason| !reason.starts_with("layer `")), "{reasons:#?}");
}

#[test]
fn numbers_that_make_no_sense_are_errors() {
    let model = gpumem_estimate::models::gpt2(16);
    let error = |step: Step| step.estimate(&model).unwrap_err().to_string();
    let training = || Step::training(1, Optimizer::Sgd);
    for none in [Step { batch: 0, ..training() }, Step { micro_batches: 0, ..training() }] {
        assert!(error(none).ends_with("are 1 or more"));
    }
    for name in ["i8", "bool", "f8", "q4_0"] {
        let parameters = name.parse().unwrap();
        assert!(error(Step { parameters, ..training() }).starts_with("parameters of this type have no gradients"));
    }
    let whole = Step { parameters: Dtype::I64, ..Step::inference(1) };
    assert!(error(whole).starts_with("parameters are numbers with a fraction"));
    assert_eq!(error(Step { autocast: Some(Dtype::F64), ..training() }), "autocast is to f16 or bf16");
    for dropout in [-0.1, 1.0, f64::NAN] {
        let adapters = Some(Lora { rank: 4, targets: ["c_attn"].into(), dropout });
        assert_eq!(error(Step { adapters, ..training() }), "the dropout of adapters is a probability below 1");
    }
    let gathered = Some(DataParallel { kind: DataParallelKind::Zero3, ranks: 2, gathered: Some(Dtype::I8) });
    assert_eq!(error(Step { data_parallel: gathered, ..training() }), "shards are gathered as f16, bf16 or f32");
    let long = Some(Decode { tokens: 1_000_000_000, cache: KvCache::Dynamic });
    assert!(error(Step { decode: long, ..Step::inference(1) }).starts_with("more than 32,768 tokens are too many"));
    let empty = gpumem_estimate::models::gpt2(0);
    let message = training().estimate(&empty).unwrap_err().to_string();
    assert_eq!(message, "the input has the shape (1, 0), which has no elements");
    for json in ["[]", "[8]", "8", "null"] {
        let message = serde_json::from_str::<Step>(json).unwrap_err().to_string();
        assert!(message.contains("expected an object with the fields of a step"), "{message}");
    }
}

/// The example of `ESTIMATE.md` is a step.
#[test]
fn the_documented_step_is_read() {
    let page = include_str!("../ESTIMATE.md");
    let section = page.split("## The steps").nth(1).unwrap();
    let json = section.split("```json").nth(1).unwrap().split("```").next().unwrap();
    let step: Step = serde_json::from_str(json).unwrap();
    assert_eq!((step.batch, step.micro_batches, step.checkpointing), (4, 8, Checkpointing::Blocks));
    let estimate = step.estimate(&gpumem_estimate::models::llama_1b(16)).unwrap();
    assert!(estimate.peak.get() > 0);
}

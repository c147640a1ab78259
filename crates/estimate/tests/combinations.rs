//! Combines the choices of a step. Each combination gives an estimate whose parts add up, or an error with the reason.

use std::collections::BTreeMap;

use gpumem_estimate::{Checkpointing, Decode, KvCache, Lora, Model, Step, models};
use serde_json::{Value, json};

/// The choices of each field of a step.
const CHOICES: &str = r#"{
    "optimizer": [null, "sgd", "adam", "adafactor", "lion", "adam8bit"],
    "parameters": ["f32", "bf16"],
    "master_weights": [false, true],
    "autocast": [null, "bf16"],
    "checkpointing": ["off", "blocks"],
    "adapters": [null, {"rank": 4, "targets": ["q_proj", "mlp.*"], "dropout": 0.1}],
    "quantized": [null, {}],
    "data_parallel": [null, {"kind": "replicas", "ranks": 2}, {"kind": "zero1", "ranks": 2}, {"kind": "zero2", "ranks": 2},
        {"kind": "zero3", "ranks": 2}, {"kind": "zero2", "ranks": 2, "gathered": "bf16"}, {"kind": "zero3", "ranks": 2, "gathered": "bf16"}],
    "micro_batches": [1, 2],
    "decode": [null, {"tokens": 3, "cache": "dynamic"}, {"tokens": 3, "cache": {"static": 40}}]
}"#;

const LLAMA: &str = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}"#;

#[test]
fn parts_add_up_or_an_error_says_why() {
    let model = Model::from_config(LLAMA, 16).unwrap();
    let choices: BTreeMap<String, Vec<Value>> = serde_json::from_str(CHOICES).unwrap();
    let (mut estimates, mut reasons) = (0, Vec::new());
    let all = choices.values().map(Vec::len).product();
    // Every 11th step is tested. 11 is prime and divides no number of choices, so all choices are combined.
    for mut number in (0..all).step_by(11) {
        let mut fields = json!({"batch": 2});
        for (field, values) in &choices {
            fields[field] = values[number % values.len()].clone();
            number /= values.len();
        }
        let step: Step = serde_json::from_value(fields).unwrap();
        let estimate = match step.estimate(&model) {
            Ok(estimate) => estimate,
            Err(error) => {
                assert!(!error.is_out_of_memory(), "{step:?}: {error}");
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
    // There are at least as many reasons as senseless pairs of these choices. No reason names a layer.
    assert!(estimates > 60 && reasons.len() >= 14, "{estimates} estimates, {reasons:#?}");
    assert!(reasons.iter().all(|reason| !reason.starts_with("layer `")), "{reasons:#?}");
}

/// Steps that make no sense for GPT-2, each with a part of the reason. They do not include the combinations of `choices`.
const SENSELESS: &[(&str, &str)] = &[
    (r#"{"batch": 0}"#, "the batch and the number of passes (`micro_batches`) are 1 or more"),
    (r#"{"optimizer": "sgd", "micro_batches": 0}"#, "are 1 or more"),
    (r#"{"optimizer": "sgd", "parameters": "i8"}"#, "parameters of this type have no gradients"),
    (r#"{"optimizer": "sgd", "parameters": "bool"}"#, "parameters of this type have no gradients"),
    (r#"{"optimizer": "sgd", "parameters": "f8"}"#, "parameters of this type have no gradients"),
    (r#"{"optimizer": "sgd", "parameters": "q4_0"}"#, "parameters of this type have no gradients"),
    (r#"{"optimizer": "sgd", "master_weights": true}"#, "copies of the parameters in f32 are for parameters"),
    (r#"{"parameters": "i64"}"#, "parameters are numbers with a fraction"),
    (r#"{"parameters": "bf16", "compute": "bf16"}"#, "`compute` is for weights that are only stored in theirs"),
    (r#"{"parameters": "q4_0", "compute": "i8"}"#, "products are computed in f16, bf16 or f32"),
    (r#"{"parameters": "q4_0", "quantized": {}}"#, "`quantized` makes weights of 4 bits from parameters in"),
    (r#"{"autocast": "f64"}"#, "autocast is to f16 or bf16"),
    (r#"{"decode": {"tokens": 0}}"#, "decoding needs at least 1 token"),
    (r#"{"decode": {"tokens": 1000000000}}"#, "more than 32,768 tokens are too many"),
    (r#"{"decode": {"tokens": 4, "cache": {"static": 18}}}"#, "attn`: a cache with room for 18 tokens cannot keep 19"),
    (r#"{"adapters": {"rank": 4, "targets": ["q_proj"]}}"#, "no linear layer has the name `q_proj`; there are c_attn"),
    (r#"{"adapters": {"rank": 0, "targets": ["c_attn"]}}"#, "adapters of rank 0 have no parameters"),
    (r#"{"adapters": {"rank": 18446744073709551615, "targets": ["c_attn"]}}"#, "the sum does not fit into 62 bits"),
    (r#"{"adapters": {"rank": 4, "targets": []}}"#, "adapters need the names of layers that get one"),
    (r#"{"adapters": {"rank": 4, "targets": ["c_attn"], "dropout": -0.1}}"#, "is a probability below 1"),
    (r#"{"adapters": {"rank": 4, "targets": ["c_attn"], "dropout": 1.0}}"#, "is a probability below 1"),
    (r#"{"quantized": {"compute": "i8"}}"#, "weights in 4 bits are multiplied as f16, bf16 or f32"),
    (r#"{"optimizer": "sgd", "data_parallel": {"kind": "zero3", "ranks": 1}}"#, "needs two ranks or more"),
    (r#"{"optimizer": "sgd", "data_parallel": {"kind": "zero3", "ranks": 18446744073709551615}}"#, "62 bits"),
    (
        r#"{"parameters": "q4_0", "data_parallel": {"kind": "zero3", "ranks": 2}}"#,
        "are not modelled with several ranks",
    ),
    (
        r#"{"data_parallel": {"kind": "zero3", "ranks": 2, "gathered": "i8"}}"#,
        "shards are gathered as f16, bf16 or f32",
    ),
    (
        r#"{"optimizer": "sgd", "data_parallel": {"kind": "replicas", "ranks": 2, "gathered": "bf16"}}"#,
        "only shards of parameters (zero2, zero3) are gathered",
    ),
];

#[test]
fn steps_that_make_no_sense_say_why() {
    let gpt2 = models::gpt2(16);
    for (json, reason) in SENSELESS {
        let message = serde_json::from_str::<Step>(json).unwrap().estimate(&gpt2).unwrap_err().to_string();
        assert!(message.contains(reason), "{json}: {message}");
    }
    let adapters = Some(Lora { rank: 4, targets: ["c_attn"].into(), dropout: f64::NAN });
    let message = Step { adapters, ..Step::inference(1) }.estimate(&gpt2).unwrap_err().to_string();
    assert_eq!(message, "the dropout of adapters is a probability below 1");
    let decode = |tokens, cache| Step { decode: Some(Decode { tokens, cache }), ..Step::inference(1) };
    assert!(decode(4, KvCache::Static(19)).estimate(&gpt2).is_ok(), "the last token is not kept");
    let bert = Model::from_config(r#"{"model_type": "bert"}"#, 16).unwrap();
    let message = decode(2, KvCache::Dynamic).estimate(&bert).unwrap_err().to_string();
    assert_eq!(message, "only a model that predicts the next token can decode");
    let message = Step::inference(1).estimate(&models::gpt2(0)).unwrap_err().to_string();
    assert_eq!(message, "the input has the shape (1, 0), which has no elements");
}

/// The example of `ESTIMATE.md` is a step.
#[test]
fn the_documented_step_is_read() {
    let page = include_str!("../ESTIMATE.md");
    let section = page.split("## The steps").nth(1).unwrap();
    let json = section.split("```json").nth(1).unwrap().split("```").next().unwrap();
    let step: Step = serde_json::from_str(json).unwrap();
    assert_eq!((step.batch, step.micro_batches, step.checkpointing), (4, 8, Checkpointing::Blocks));
    let estimate = step.estimate(&Model::from_config(LLAMA, 16).unwrap()).unwrap();
    assert!(estimate.peak.get() > 0);
}

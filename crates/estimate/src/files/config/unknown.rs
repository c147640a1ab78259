//! Estimates the weights of an unknown architecture: they are those of a known decoder with the sizes in its configuration.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::{Dtype, Model, Tensors};

/// The objects inside a configuration that may contain the sizes of the decoder.
const INSIDE: [&str; 4] = ["text_config", "language_config", "llm_config", "thinker_config"];

/// The fields with the number of experts.
const EXPERTS: [&str; 3] = ["num_local_experts", "num_experts", "n_routed_experts"];

/// The fields that all decoders have.
const SIZES: [&str; 4] = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"];

/// Other fields with the same meaning in all decoders.
const KNOWN: [&str; 5] =
    ["intermediate_size", "num_key_value_heads", "head_dim", "tie_word_embeddings", "moe_intermediate_size"];

/// A field whose name contains one of these describes weights that a plain decoder does not have.
const OTHERS: [&str; 12] =
    ["vision", "audio", "projector", "linear_", "mamba", "ssm", "conv", "lora_rank", "shared", "nextn", "mtp", "dense"];

/// A decoder whose architecture is unknown.
pub(in crate::files) struct UnknownDecoder {
    pub(in crate::files) weights: Tensors,
    /// The bytes of the keys and values of a token. `None` if some layers do not keep them for each token.
    pub(in crate::files) cache: Option<u64>,
    /// The fields that say what else the model may contain.
    pub(in crate::files) others: BTreeSet<String>,
    /// The known decoder: with attention in one kernel, and with stored scores.
    pub(in crate::files) stand_ins: [Model; 2],
}

/// Returns a decoder with the sizes in a configuration. `None` if the configuration is not that of a decoder, if its architecture is known,
/// or if the weights are quantized.
pub(in crate::files) fn unknown_decoder(fields: &Value, dtype: Dtype, length: u64) -> Option<UnknownDecoder> {
    let class = fields["architectures"][0].as_str()?;
    let is_known = Model::known_architectures().any(|known| known == class);
    (!is_known && fields["quantization_config"].is_null()).then_some(())?;
    let inside = INSIDE.iter().map(|key| &fields[*key]).find(|inner| inner.is_object());
    let decoder = inside.unwrap_or(fields);
    let number = |key: &str| decoder[key].as_u64().filter(|number| *number > 0);
    SIZES.iter().all(|key| number(key).is_some()).then_some(())?;
    let experts = EXPERTS.iter().find_map(|key| number(key));
    let has_bias = decoder["attention_bias"].as_bool() == Some(true);
    let (class, kind) = match experts {
        Some(_) => ("MixtralForCausalLM", "mixtral"),
        None if has_bias => ("Qwen2ForCausalLM", "qwen2"),
        None => ("LlamaForCausalLM", "llama"),
    };
    let of_token = number("num_experts_per_tok").filter(|of_token| Some(*of_token) <= experts);
    let mut known = json!({
        "architectures": [class], "model_type": kind, "num_local_experts": experts, "num_experts_per_tok": of_token,
    });
    for key in SIZES.iter().chain(&KNOWN) {
        known[*key] = decoder[*key].clone();
    }
    number("intermediate_size").or_else(|| number("moe_intermediate_size").filter(|_| experts.is_some()))?;
    let fused = Model::from_fields(&known, length).ok()?;
    known["stores_scores"] = true.into();
    let stand_ins = [fused, Model::from_fields(&known, length).ok()?];
    let weights = stand_ins[0].parameters(dtype).ok()?;
    let is_set = |value: &Value| !matches!(value, Value::Null | Value::Bool(false)) && value.as_u64() != Some(0);
    let fields = [fields, decoder].into_iter().filter_map(Value::as_object).flatten();
    let others = fields.filter(|(key, value)| is_set(value) && OTHERS.iter().any(|part| key.contains(part)));
    let others: BTreeSet<String> = others.map(|(key, _)| key.clone()).collect();
    let heads = number("num_attention_heads")?;
    let size = number("head_dim").or_else(|| number("hidden_size")?.checked_div(heads))?;
    let keeps_all =
        !others.iter().any(|key| ["linear_", "mamba", "ssm", "lora_rank"].iter().any(|part| key.contains(part)));
    let sizes =
        [2, number("num_hidden_layers")?, number("num_key_value_heads").unwrap_or(heads), size, dtype.bytes(1)?];
    let cache = sizes.into_iter().try_fold(1_u64, u64::checked_mul).filter(|_| keeps_all);
    Some(UnknownDecoder { weights, cache, others, stand_ins })
}

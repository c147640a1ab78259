//! Models from the metadata of GGUF files.

use serde_json::{Value, json};

use super::{config, gguf::Gguf};
use crate::{Dtype, Error, Model, Result, ensure};

/// Tensors that are not parameters: factors for the angles of positions, which other programs compute.
const NO_PARAMETERS: [&str; 3] = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

fn wrong(what: impl std::fmt::Display) -> Error {
    Error::invalid(format!("GGUF: {what}"))
}

impl Gguf {
    /// Returns the model that the metadata describes, for sequences of this length, as PyTorch would run it.
    ///
    /// # Errors
    /// Returns an error if the architecture is not known, if the metadata is incomplete, or if the model has another
    /// number of parameters than the file.
    pub fn model(&self, length: u64) -> Result<Model> {
        let config = self.config()?;
        let model = Model::from_fields(&config, length)?;
        let built = model.parameters(Dtype::F32)?.sum().elements;
        let others = self.tensors().all().iter().filter(|tensor| NO_PARAMETERS.contains(&tensor.name.as_str()));
        let others: u64 = others.filter_map(|tensor| tensor.shape.elements()).sum();
        let found = self.tensors().sum().elements.saturating_sub(others);
        let what = || format!("the metadata describes a model with {built} parameters, and the file has {found}");
        ensure(built == found, || wrong(what()))?;
        let name = self.text("general.name").unwrap_or(&model.name).to_owned();
        Ok(Model { name, ..model })
    }

    /// Converts the metadata to a `config.json`.
    fn config(&self) -> Result<Value> {
        let architecture = self.architecture().ok_or_else(|| wrong("the file names no architecture"))?;
        let key = |name: &str| format!("{architecture}.{name}");
        let number = |name: &str| {
            // A list with a number for each layer is usable if all numbers are the same.
            let all = match self.value(&key(name)) {
                Some(Value::Array(numbers)) => numbers,
                value => value.map_or(&[][..], std::slice::from_ref),
            };
            match all.split_first() {
                None if self.value(&key(name)).is_none() => Ok(None),
                Some((Value::Number(first), others))
                    if first.is_u64() && others.iter().all(|other| *other == all[0]) =>
                {
                    Ok(first.as_u64())
                }
                _ => Err(wrong(format!("`{}` is not one whole number", key(name)))),
            }
        };
        let needed = |name: &str| number(name)?.ok_or_else(|| wrong(format!("`{}` is missing", key(name))));
        let has = |tensor: &str| self.tensors().all().iter().any(|known| known.name == tensor);
        let experts = number("expert_count")?.filter(|experts| *experts > 0);
        let all = || config::all().filter_map(|family| Some((family.gguf.as_deref()?, family)));
        let named = || all().filter(|(known, _)| *known == architecture);
        let found = named().find(|(_, family)| family.has_experts() == experts.is_some());
        let (_, family) = found.ok_or_else(|| {
            let with = if experts.is_some() { " with experts" } else { " without experts" };
            let with = named().next().map_or("", |_| with);
            let mut known: Vec<_> = all().map(|(known, _)| known).collect();
            known.dedup();
            let known = known.join(", ");
            wrong(format!("the architecture `{architecture}`{with} is not supported; supported are {known}"))
        })?;
        let (size, heads) = (needed("embedding_length")?, needed("attention.head_count")?);
        ensure(heads != 0, || wrong(format!("`{}` is 0", key("attention.head_count"))))?;
        let head_size = number("attention.key_length")?.unwrap_or(size / heads);
        let fits = number("attention.value_length")?.is_none_or(|values| values == head_size);
        ensure(fits, || wrong("keys and values of different sizes are not supported"))?;
        let table = self.tensors().all().iter().find(|tensor| tensor.name == "token_embd.weight");
        let vocabulary = table.and_then(|table| table.shape.sizes().first().copied());
        let vocabulary = vocabulary.ok_or_else(|| wrong("the tensor `token_embd.weight` is missing"))?;
        let rotated = number("rope.dimension_count")?.unwrap_or(head_size);
        #[expect(clippy::cast_precision_loss, reason = "a head has few elements")]
        let factor = rotated as f64 / head_size.max(1) as f64;
        let caps = |name: &str| self.value(&key(name)).map(|_| true);
        // llama.cpp has no windows for Llama. `null` means none as well.
        let window = number("attention.sliding_window")?.filter(|_| family.gguf.as_deref() != Some("llama"));
        Ok(json!({
            "vocab_size": vocabulary,
            "hidden_size": size,
            "num_hidden_layers": needed("block_count")?,
            "num_attention_heads": heads,
            "num_key_value_heads": number("attention.head_count_kv")?.unwrap_or(heads),
            "head_dim": head_size,
            "tie_word_embeddings": !has("output.weight"),
            "attention_bias": has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias"),
            "intermediate_size": number("feed_forward_length")?,
            "num_experts": experts,
            "num_local_experts": experts,
            "num_experts_per_tok": number("expert_used_count")?,
            "moe_intermediate_size": number("expert_feed_forward_length")?,
            "shared_expert_intermediate_size": number("expert_shared_feed_forward_length")?,
            "partial_rotary_factor": factor,
            "rotary_pct": factor,
            "attn_logit_softcapping": caps("attn_logit_softcapping"),
            "final_logit_softcapping": caps("final_logit_softcapping"),
            "model_type": family.model_type,
            "sliding_window": window,
        }))
    }
}

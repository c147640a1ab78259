//! Models that predict the next token: the builder of the records in `families.json`.

use std::collections::HashSet;

use super::{
    families::{Family, Mlp, Order, Slides},
    fields::{Fields, head_size, wrong},
};
use crate::{
    error::Error,
    layer::{
        Attention, AttentionNames, Experts, Function, HeadNorm, Layer, Linear, Named, RunExperts, linear, numbered,
    },
    model::{Input, Loss, Model},
};

/// Builds a model of a family.
pub(super) fn build(family: &Family, fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let name = family.model_type.trim_end_matches("_text").to_owned();
    let layers = layers(family, fields, &family.prefix, "lm_head")?;
    Ok(Model { name, input: Input::Tokens(length), layers, loss: Loss::NextToken })
}

/// Returns the layers of a model of a family. `prefix` is the first part of the names of modules, such as `model`.
pub(super) fn layers(family: &Family, fields: Fields<'_>, prefix: &str, head: &str) -> Result<Vec<Named>, Error> {
    let all = fields.with_defaults(&family.defaults);
    let fields = fields.of(&all);
    let (vocabulary, size) = (fields.number("vocab_size", 0)?, fields.number("hidden_size", 0)?);
    let is_tied = fields.flag("tie_word_embeddings", false)?;
    Frame { family, fields, prefix, head, vocabulary, size, is_tied }.layers()
}

/// A model of a family.
struct Frame<'a> {
    family: &'a Family,
    /// The fields of the configuration, with the defaults of the family.
    fields: Fields<'a>,
    prefix: &'a str,
    head: &'a str,
    vocabulary: u64,
    size: u64,
    is_tied: bool,
}

impl Frame<'_> {
    /// Returns whether a field limits scores or logits. `null` means that nothing is limited.
    fn is_capped(&self, field: &str) -> bool {
        self.fields.get(field).map_or(self.family.is_capped, |value| !value.is_null())
    }

    /// Returns the dropout in a field; 0 if there is none.
    fn dropout(&self, field: Option<&String>) -> Result<f64, Error> {
        field.map_or(Ok(0.0), |field| self.fields.fraction(field, 0.0))
    }

    fn path(&self, module: &str) -> String {
        format!("{}.{module}", self.prefix)
    }

    /// Returns the layers of the model.
    fn layers(&self) -> Result<Vec<Named>, Error> {
        let (family, fields) = (self.family, self.fields);
        for field in &family.off {
            fields.is_off(field)?;
        }
        let count = Fields::blocks("num_hidden_layers", fields.number("num_hidden_layers", 0)?)?;
        let blocks = if family.model_type == "llama4_text" { self.llama4(count)? } else { self.blocks(count)? };
        let embedding = Layer::Embedding { rows: self.vocabulary, size: self.size };
        let embedding = vec![embedding.named(self.path(&family.embedding))];
        let mut layers = dropped(embedding, self.dropout(family.embedding_dropout.as_ref())?);
        if family.scales_embedding {
            layers.push(Layer::Scale.named(""));
        }
        let blocks = numbered(blocks.into_iter().map(|layers| Layer::Block { layers }));
        layers.push(Layer::Sequential { layers: blocks }.named(self.path("layers")));
        layers.push(self.norm(&self.path(&family.last_norm)));
        let tied_to = self.is_tied.then(|| self.path(&family.embedding));
        let head = Linear { inputs: self.size, outputs: self.vocabulary, no_bias: !family.head_has_bias, tied_to };
        let head = Layer::Linear(head).named(self.head);
        let is_capped = self.is_capped("final_logit_softcapping");
        // `cap * tanh(logits / cap)`.
        let tanh = Layer::Activation { function: Function::Tanh, in_place: false };
        let cap = [Layer::Scale, tanh, Layer::Scale].map(|layer| layer.named(""));
        layers.push(if is_capped { inline([head].into_iter().chain(cap).collect()) } else { head });
        Ok(layers)
    }

    fn blocks(&self, count: usize) -> Result<Vec<Vec<Named>>, Error> {
        let (family, fields, hidden) = (self.family, self.fields, self.hidden()?);
        let (attention, mlp) = (self.attention()?, self.mlp(hidden)?);
        let experts = if family.experts > 0 { Some(Layer::Experts(self.experts(hidden)?).named("mlp")) } else { None };
        // The layers without experts have an MLP.
        let step = fields.optional("decoder_sparse_step")?.unwrap_or(1);
        let plain: HashSet<u64> = fields.numbers("mlp_only_layers")?.unwrap_or_default().into_iter().collect();
        let has_experts = |at: u64| (at + 1).is_multiple_of(step) && !plain.contains(&at);
        let dropout = self.dropout(family.dropout.as_ref())?;
        let is_parallel = match &family.order {
            Order::Serial => false,
            Order::ParallelWithOneNorm => true,
            Order::Parallel(field) => fields.flag(field, true)?,
        };
        let blocks = (0..).zip(self.windows(count)?).map(|(at, window)| {
            let attention = Layer::Attention(Attention { window, ..attention.clone() }).named(&*family.attention);
            let mlp = experts.as_ref().filter(|_| has_experts(at)).unwrap_or(&mlp).clone();
            self.block(attention, mlp, is_parallel, dropout)
        });
        Ok(blocks.collect())
    }

    fn block(&self, attention: Named, mlp: Named, is_parallel: bool, dropout: f64) -> Vec<Named> {
        let (mut first, mut second) = (vec![attention], vec![mlp]);
        let mut before_mlp = "post_attention_layernorm";
        if self.family.norms_outputs {
            first.push(self.norm(before_mlp));
            second.push(self.norm("post_feedforward_layernorm"));
            before_mlp = "pre_feedforward_layernorm";
        }
        let [mut first, mut second] = [first, second].map(|layers| dropped(layers, dropout));
        let branches = |first, second| Layer::Branches { layers: vec![inline(first), inline(second)] }.named("");
        let norm = self.norm("input_layernorm");
        if matches!(self.family.order, Order::ParallelWithOneNorm) {
            return vec![residual(vec![norm, branches(first, second)])];
        }
        first.insert(0, norm);
        second.insert(0, self.norm(before_mlp));
        if is_parallel {
            vec![residual(vec![branches(first, second)])]
        } else {
            vec![residual(first), residual(second)]
        }
    }

    fn norm(&self, name: &str) -> Named {
        let norm = self.family.norm.layer(self.size).expect("a family has norms");
        norm.named(name)
    }

    fn attention(&self) -> Result<Attention, Error> {
        let (family, fields, size) = (self.family, self.fields, self.size);
        let heads = fields.divisor("num_attention_heads", 0)?;
        let head_size = match fields.optional("head_dim")? {
            Some(size) => size,
            None => head_size(size, heads)?,
        };
        let has_bias = family.bias.as_ref().map_or(Ok(true), |field| fields.flag(field, false))?;
        let has_norm = family.head_norm_field.as_ref().map_or(Ok(true), |field| fields.flag(field, false))?;
        let names = AttentionNames::new(["q_proj", "k_proj", "v_proj", &family.output]);
        let joined = family.joined.as_ref().unwrap_or(&names.joined).clone();
        Ok(Attention {
            size,
            heads,
            key_value_heads: fields.derived("num_key_value_heads", heads)?,
            head_size,
            no_bias: !has_bias,
            no_output_bias: family.no_output_bias,
            is_joined: family.joined.is_some(),
            takes_parts: family.takes_parts,
            norm: if has_norm { family.head_norm } else { HeadNorm::None },
            rotates: true,
            rotated: family.rotated.as_ref().map_or(Ok(0), |field| self.rotated(field, head_size))?,
            caps_scores: self.is_capped("attn_logit_softcapping"),
            stores_scores: family.stores_scores,
            dropout: fields.fraction("attention_dropout", 0.0)?,
            keeps_cache: true,
            names: AttentionNames { joined, norms: family.head_norms.clone(), ..names },
            ..Attention::default()
        })
    }

    /// Returns the number of elements of a head that are rotated. The factor may be in one of two fields.
    fn rotated(&self, field: &str, head_size: u64) -> Result<u64, Error> {
        let factor = self.fields.fraction(field, 1.0)?;
        let factor = self.fields.inner("rope_parameters").fraction("partial_rotary_factor", factor)?;
        if !(0.0..=1.0).contains(&factor) {
            return Err(wrong(format!("`{field}` is {factor}, which is not between 0 and 1")));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "as `int(...)`"
        )]
        Ok((head_size as f64 * factor) as u64)
    }

    /// Returns the size inside the MLP.
    fn hidden(&self) -> Result<u64, Error> {
        let size = self.fields.optional("intermediate_size")?.or_else(|| self.size.checked_mul(4));
        size.ok_or_else(|| wrong("the sizes are too large"))
    }

    fn function(&self) -> Result<Function, Error> {
        // Gemma 1 uses the field `hidden_act`, in which `gelu` also meant the form with `tanh`.
        let is_known = self.fields.get("hidden_activation").is_some_and(|value| !value.is_null());
        self.fields.function(if is_known { "hidden_activation" } else { "hidden_act" }, "silu")
    }

    fn mlp(&self, hidden: u64) -> Result<Named, Error> {
        let (size, function) = (self.size, self.function()?);
        let no_bias = !self.fields.flag("mlp_bias", false)?;
        let mlp = match &self.family.mlp {
            Mlp::Plain([first, second]) => {
                let activation = Layer::Activation { function, in_place: false }.named("");
                return Ok(inline(vec![
                    linear(first, size, hidden, false),
                    activation,
                    linear(second, hidden, size, false),
                ]));
            }
            Mlp::Gated => Layer::gated_mlp(size, hidden, function, no_bias),
            Mlp::GatedJoined => {
                let both = hidden.checked_mul(2).ok_or_else(|| wrong("the sizes are too large"))?;
                let gate = Layer::Gate { function }.named("");
                let down = linear("down_proj", hidden, size, no_bias);
                Layer::Sequential { layers: vec![linear("gate_up_proj", size, both, no_bias), gate, down] }
            }
        };
        Ok(mlp.named("mlp"))
    }

    /// Creates experts whose products are grouped. `hidden` is the size inside the MLP.
    fn experts(&self, hidden: u64) -> Result<Experts, Error> {
        let fields = self.fields;
        let count = fields.optional("num_experts")?.or(fields.optional("num_local_experts")?);
        Ok(Experts {
            size: self.size,
            hidden: fields.derived("moe_intermediate_size", hidden)?,
            experts: count.unwrap_or(self.family.experts),
            per_token: fields.number("num_experts_per_tok", 0)?,
            function: self.function()?,
            shared: fields.derived("shared_expert_intermediate_size", 0)?,
            run: RunExperts::Grouped,
        })
    }

    /// Returns the window of each layer; 0 for none.
    fn windows(&self, blocks: usize) -> Result<Vec<u64>, Error> {
        let fields = self.fields;
        let has_windows = fields.flag("use_sliding_window", true)?;
        let window = if has_windows { fields.number_or_null("sliding_window", self.family.window)? } else { 0 };
        match self.family.slides {
            Slides::None => Ok(vec![0; blocks]),
            Slides::All => Ok(vec![window; blocks]),
            Slides::Last => {
                let first = fields.number("max_window_layers", 0)?;
                windows(fields, blocks, window, |at| at as u64 >= first)
            }
            Slides::EverySecond => windows(fields, blocks, window, |at| at % 2 == 0),
            Slides::AllButEach => {
                let known = fields.optional("sliding_window_pattern")?.is_some();
                let pattern = if known { "sliding_window_pattern" } else { "_sliding_window_pattern" };
                let pattern = fields.divisor(pattern, 6)?;
                windows(fields, blocks, window, |at| !(at as u64 + 1).is_multiple_of(pattern))
            }
        }
    }

    /// Returns the blocks of Llama 4, which mixes several kinds.
    fn llama4(&self, blocks: usize) -> Result<Vec<Vec<Named>>, Error> {
        let (fields, size) = (self.fields, self.size);
        let attention = Attention { rotates_complex: true, ..self.attention()? };
        let hidden = self.hidden()?;
        let experts = Experts { shared: hidden, run: RunExperts::All, ..self.experts(hidden)? };
        let hidden = fields.number("intermediate_size_mlp", 16_384)?;
        let plain = self.mlp(hidden)?;
        let every = fields.divisor("no_rope_layer_interval", 4)?;
        // The list contains 1 for each layer that rotates. An empty list is ignored.
        let rotates = fields.numbers("no_rope_layers")?.filter(|list| !list.is_empty());
        let rotates =
            rotates.unwrap_or_else(|| (1..=blocks as u64).map(|at| u64::from(!at.is_multiple_of(every))).collect());
        if rotates.len() < blocks {
            let what = "fewer elements than the model has layers";
            return Err(wrong(format!("`no_rope_layers` has {what}: {} and {blocks}", rotates.len())));
        }
        let step = fields.divisor("interleave_moe_layer_step", 1)?;
        let moe = fields.numbers("moe_layers")?.map(HashSet::<u64>::from_iter);
        let has_experts = |at: u64| match &moe {
            Some(layers) => layers.contains(&at),
            None => (at + 1).is_multiple_of(step),
        };
        let window = fields.number_or_null("attention_chunk_size", 8192)?;
        let windows = windows(fields, blocks, window, |at| rotates[at] != 0)?;
        let (has_norm, tunes) = (fields.flag("use_qk_norm", true)?, fields.flag("attn_temperature_tuning", true)?);
        let blocks = windows.into_iter().enumerate().map(|(at, window)| {
            let rotates = rotates[at] != 0;
            let norm = if has_norm && rotates { HeadNorm::WithoutWeight } else { HeadNorm::None };
            let scales_queries = tunes && !rotates;
            let attention = Attention { norm, rotates, scales_queries, window, ..attention.clone() };
            let mlp = if has_experts(at as u64) { Layer::Experts(experts.clone()) } else { plain.layer.clone() };
            // A variable in the block's Python function holds the output of attention, so it lives until the block returns.
            let slot = "attention output".to_owned();
            let norm = |name: &str| Layer::RmsNorm { size }.named(name);
            let leave = Layer::Leave { slot: slot.clone() }.named("");
            vec![
                residual(vec![norm("input_layernorm"), Layer::Attention(attention).named("self_attn"), leave]),
                residual(vec![norm("post_attention_layernorm"), mlp.named("feed_forward")]),
                Layer::Release { slot }.named(""),
            ]
        });
        Ok(blocks.collect())
    }
}

/// Returns the window of each layer; 0 for none. If the configuration does not list the layers, `slides` decides which
/// of them have a window.
fn windows(fields: Fields<'_>, blocks: usize, window: u64, slides: impl Fn(usize) -> bool) -> Result<Vec<u64>, Error> {
    let of_layer = |slides| if slides { window } else { 0 };
    let Some(types) = fields.list("layer_types")? else {
        return Ok((0..blocks).map(|at| of_layer(slides(at))).collect());
    };
    if types.len() < blocks {
        let what = "fewer elements than the model has layers";
        return Err(wrong(format!("`layer_types` has {what}: {} and {blocks}", types.len())));
    }
    let known = |kind: &serde_json::Value| match kind.as_str() {
        Some("sliding_attention" | "chunked_attention") => Ok(window),
        Some("full_attention") => Ok(0),
        _ => Err(wrong(format!("`layer_types` has {kind}, which is not supported"))),
    };
    types[..blocks].iter().map(known).collect()
}

/// Creates a sequence without a name, whose layers belong to the layer around it.
fn inline(layers: Vec<Named>) -> Named {
    Layer::Sequential { layers }.named("")
}

/// Creates a layer that adds the output of these layers to their input.
fn residual(layers: Vec<Named>) -> Named {
    Layer::Residual { layers, shortcut: vec![], in_place: false }.named("")
}

/// Returns these layers, followed by dropout unless the probability is 0.
fn dropped(mut layers: Vec<Named>, probability: f64) -> Vec<Named> {
    layers.extend((probability != 0.0).then(|| Layer::Dropout { probability }.named("")));
    layers
}

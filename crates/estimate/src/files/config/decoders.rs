//! Models that predict the next token: the builder of the records in `families.json`, and the models that need code.

use std::collections::HashSet;

use super::{
    encoders,
    families::{FAMILIES, Family, Mlp, Norm, Order, Slides},
    fields::{Fields, head_size, product, wrong},
    parts::{dropped, inline, layer_norm, linear, mlp, residual, rms_norm},
};
use crate::{
    error::Error,
    layer::{
        Attention, AttentionNames, Embeddings, Experts, Function, HeadNorm, Layer, Linear, Named, RunExperts, numbered,
    },
    model::{Input, Loss, Model},
};

/// Builds a model of a family.
pub(super) fn build(family: &Family, fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    build_with(family, fields, length, |_| Ok(Vec::new()))
}

/// Builds a model of a family, with the layers for images that a function returns. They do not run.
fn build_with(
    family: &Family,
    fields: Fields<'_>,
    length: u64,
    images: impl FnOnce(&mut Frame<'_>) -> Result<Vec<Named>, Error>,
) -> Result<Model, Error> {
    let all = fields.with_defaults(&family.defaults);
    let fields = fields.of(&all);
    let mut frame = Frame {
        family,
        fields,
        prefix: &family.prefix,
        head: "lm_head",
        vocabulary: fields.number("vocab_size", 0)?,
        size: fields.number("hidden_size", 0)?,
        is_tied: fields.flag("tie_word_embeddings", false)?,
    };
    let idle = images(&mut frame)?;
    let mut layers = frame.layers()?;
    if !idle.is_empty() {
        layers.insert(0, Layer::Idle { layers: idle }.named(""));
    }
    let name = family.model_type.trim_end_matches("_text").to_owned();
    Ok(Model { name, input: Input::Tokens(length), layers, loss: Loss::NextToken })
}

/// A model of a family.
struct Frame<'a> {
    family: &'a Family,
    /// The fields of the configuration, with the defaults of the family.
    fields: Fields<'a>,
    /// The first part of the names of modules, such as `model`.
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
        let count = fields.layers("num_hidden_layers", 0)?;
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
        layers.push(if is_capped { inline(vec![head, Layer::SoftCap.named("")]) } else { head });
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
        let size = self.size;
        let norm = match self.family.norm {
            Norm::Rms => Layer::RmsNorm { size },
            Norm::Gemma => Layer::GemmaNorm { size },
            Norm::Layer => Layer::LayerNorm { size },
        };
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
        self.fields.optional("intermediate_size")?.map_or_else(|| product(&[4, self.size]), Ok)
    }

    fn function(&self) -> Result<Function, Error> {
        // Gemma 1 uses the field `hidden_act`, in which `gelu` also meant the form with `tanh`.
        let is_known = self.fields.get("hidden_activation").is_some_and(|value| !value.is_null());
        self.fields.function(if is_known { "hidden_activation" } else { "hidden_act" }, "silu")
    }

    fn mlp(&self, hidden: u64) -> Result<Named, Error> {
        let (size, function) = (self.size, self.function()?);
        let is_joined = match &self.family.mlp {
            Mlp::Plain(names) => return Ok(mlp([&names[0], &names[1]], size, hidden, function)),
            Mlp::Gated => false,
            Mlp::GatedJoined => true,
        };
        let has_bias = self.fields.flag("mlp_bias", false)?;
        Ok(Layer::GatedMlp { size, hidden, function, is_joined, has_bias }.named("mlp"))
    }

    /// Creates experts whose products are grouped. `hidden` is the size inside the MLP.
    fn experts(&self, hidden: u64) -> Result<Experts, Error> {
        let fields = self.fields;
        let count = fields.optional("num_experts")?.or(fields.optional("num_local_experts")?);
        let shared = fields.derived("shared_expert_intermediate_size", 0)?;
        Ok(Experts {
            size: self.size,
            hidden: fields.derived("moe_intermediate_size", hidden)?,
            experts: count.unwrap_or(self.family.experts),
            per_token: fields.number("num_experts_per_tok", 0)?,
            function: self.function()?,
            shared,
            gates_shared: shared > 0,
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
            let first = vec![rms_norm("input_layernorm", size), Layer::Attention(attention).named("self_attn")];
            held(first, vec![residual(vec![rms_norm("post_attention_layernorm", size), mlp.named("feed_forward")])])
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

fn family(model_type: &str) -> &'static Family {
    FAMILIES.iter().find(|family| family.model_type == model_type).expect("a family of `families.json`")
}

pub(super) fn gemma3_with_images(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let (text, vision) = (fields.inner("text_config"), fields.inner("vision_config"));
    build_with(family("gemma3_text"), text, length, |frame| {
        frame.prefix = "model.language_model";
        frame.is_tied = text.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", true)?)?;
        let mut layers = encoders::siglip(vision, "model.vision_tower")?;
        let size = vision.number("hidden_size", 768)?;
        layers.push(linear("model.multi_modal_projector", size, frame.size, false));
        layers.push(Layer::GemmaNorm { size }.named("model.multi_modal_projector.mm_soft_emb_norm"));
        Ok(layers)
    })
}

pub(super) fn llama4_with_images(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let (text, vision) = (fields.inner("text_config"), fields.inner("vision_config"));
    build_with(family("llama4_text"), text, length, |frame| {
        (frame.prefix, frame.head) = ("language_model.model", "language_model.lm_head");
        let mut layers = encoders::llama4_vision(vision, "vision_model")?;
        let outputs = vision.number("vision_output_dim", 7680)?;
        layers.push(linear("multi_modal_projector.linear_1", outputs, frame.size, false));
        Ok(layers)
    })
}

/// Returns a block that adds the output of the first layers to the input, and runs other layers on the sum. A variable
/// in the block's Python function holds the output of the first layers, so it lives until the block returns.
fn held(mut first: Vec<Named>, others: Vec<Named>) -> Vec<Named> {
    let slot = "attention output".to_owned();
    first.push(Layer::Leave { slot: slot.clone() }.named(""));
    let mut layers = vec![residual(first)];
    layers.extend(others);
    layers.push(Layer::Release { slot }.named(""));
    layers
}

pub(super) fn gpt2(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let size = fields.number("n_embd", 768)?;
    let heads = fields.divisor("n_head", 12)?;
    head_size(size, heads)?;
    fields.is("tie_word_embeddings", true)?;
    fields.is("add_cross_attention", false)?;
    fields.is("reorder_and_upcast_attn", false)?;
    let function = fields.function("activation_function", "gelu_new")?;
    let probability = fields.fraction("resid_pdrop", 0.1)?;
    let hidden = fields.derived("n_inner", product(&[4, size])?)?;
    let (vocabulary, positions) = (fields.number("vocab_size", 50_257)?, fields.number("n_positions", 1024)?);
    let attention = Attention {
        size,
        heads,
        is_joined: true,
        keeps_cache: true,
        names: AttentionNames::joined("c_attn", "c_proj"),
        ..Attention::default()
    };
    let first = vec![layer_norm("ln_1", size), Layer::Attention(attention).named("attn")];
    let second = vec![layer_norm("ln_2", size), mlp(["mlp.c_fc", "mlp.c_proj"], size, hidden, function)];
    let [first, second] = [first, second].map(|layers| dropped(layers, probability));
    let block = Layer::Block { layers: held(first, vec![residual(second)]) };
    let names = ["transformer.wte", "transformer.wpe", ""].map(str::to_owned).to_vec();
    let embeddings = Embeddings { size, tokens: vocabulary, positions, segments: 0, names };
    let tied_to = Some("transformer.wte".to_owned());
    let head = Linear { inputs: size, outputs: vocabulary, no_bias: true, tied_to };
    let mut layers = dropped(vec![Layer::Embeddings(embeddings).named("")], fields.fraction("embd_pdrop", 0.1)?);
    let blocks = vec![block; fields.layers("n_layer", 12)?];
    layers.extend([
        Layer::Sequential { layers: numbered(blocks) }.named("transformer.h"),
        layer_norm("transformer.ln_f", size),
        Layer::Linear(head).named("lm_head"),
    ]);
    Ok(Model { name: "gpt2".to_owned(), input: Input::Tokens(length), layers, loss: Loss::NextToken })
}

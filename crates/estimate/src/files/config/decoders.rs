//! Models that predict the next token.

use std::collections::HashSet;

use super::{
    encoders,
    fields::{Fields, head_size, product, wrong},
    parts::{dropped, inline, layer_norm, linear, mlp, residual, rms_norm},
};
use crate::{
    error::Error,
    layer::{Attention, AttentionNames, Embeddings, Experts, HeadNorm, Layer, Linear, Named, RunExperts, numbered},
    model::{Input, Loss, Model},
};

/// The parts around the blocks.
struct Frame<'a> {
    name: &'a str,
    /// The first part of the names of modules, such as `model`.
    prefix: &'a str,
    head: &'a str,
    embedding: &'a str,
    vocabulary: u64,
    size: u64,
    is_tied: bool,
}

impl Frame<'_> {
    /// Reads the sizes from the fields that most configurations contain.
    fn read(name: &'static str, fields: Fields<'_>, defaults: [u64; 2], is_tied: bool) -> Result<Self, Error> {
        let [vocabulary, size] = defaults;
        Ok(Self {
            name,
            prefix: "model",
            head: "lm_head",
            embedding: "embed_tokens",
            vocabulary: fields.number("vocab_size", vocabulary)?,
            size: fields.number("hidden_size", size)?,
            is_tied: fields.flag("tie_word_embeddings", is_tied)?,
        })
    }

    fn path(&self, module: &str) -> String {
        format!("{}.{module}", self.prefix)
    }

    fn embedding(&self) -> Named {
        Layer::Embedding { rows: self.vocabulary, size: self.size }.named(self.path(self.embedding))
    }

    fn blocks(&self, blocks: impl IntoIterator<Item = Vec<Named>>) -> Named {
        let blocks = blocks.into_iter().map(|layers| Layer::Block { layers });
        Layer::Sequential { layers: numbered(blocks) }.named(self.path("layers"))
    }

    fn head(&self, has_bias: bool) -> Named {
        let tied_to = self.is_tied.then(|| self.path(self.embedding));
        let head = Linear { inputs: self.size, outputs: self.vocabulary, no_bias: !has_bias, tied_to };
        Layer::Linear(head).named(self.head)
    }

    fn model(&self, length: u64, layers: Vec<Named>) -> Model {
        Model { name: self.name.to_owned(), input: Input::Tokens(length), layers, loss: Loss::NextToken }
    }

    /// Creates a model of embedding, blocks, RMS norm and head.
    fn plain(&self, length: u64, blocks: impl IntoIterator<Item = Vec<Named>>) -> Model {
        let norm = rms_norm(&self.path("norm"), self.size);
        self.model(length, vec![self.embedding(), self.blocks(blocks), norm, self.head(false)])
    }
}

/// Creates the attention of a causal model, with rotated queries and keys and without biases.
fn attention(fields: Fields<'_>, size: u64, heads: u64, key_value_heads: Option<u64>) -> Result<Attention, Error> {
    let heads = fields.divisor("num_attention_heads", heads)?;
    let key_value_heads = match key_value_heads {
        Some(count) => fields.number("num_key_value_heads", count)?,
        None => fields.derived("num_key_value_heads", heads)?,
    };
    let head_size = match fields.optional("head_dim")? {
        Some(size) => size,
        None => head_size(size, heads)?,
    };
    let dropout = fields.fraction("attention_dropout", 0.0)?;
    let (no_bias, rotates, keeps_cache) = (true, true, true);
    Ok(Attention {
        size,
        heads,
        key_value_heads,
        head_size,
        no_bias,
        rotates,
        dropout,
        keeps_cache,
        ..Attention::default()
    })
}

/// Creates a gated MLP without biases.
fn gated(fields: Fields<'_>, size: u64, hidden: u64) -> Result<Named, Error> {
    let hidden = fields.number("intermediate_size", hidden)?;
    let function = fields.function("hidden_act", "silu")?;
    Ok(Layer::GatedMlp { size, hidden, function, is_joined: false, has_bias: false }.named("mlp"))
}

/// Returns the layers of a block: RMS norm, attention, a sum, RMS norm, MLP, a sum.
fn block(attention: Attention, mlp: Named) -> Vec<Named> {
    let size = attention.size;
    vec![
        residual(vec![rms_norm("input_layernorm", size), Layer::Attention(attention).named("self_attn")]),
        residual(vec![rms_norm("post_attention_layernorm", size), mlp]),
    ]
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

pub(super) fn llama(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("llama", fields, [32_000, 4096], false)?;
    let has_bias = fields.flag("attention_bias", false)?;
    let attention = Attention { no_bias: !has_bias, ..attention(fields, frame.size, 32, None)? };
    let mut mlp = gated(fields, frame.size, 11_008)?;
    if let Layer::GatedMlp { has_bias, .. } = &mut mlp.layer {
        *has_bias = fields.flag("mlp_bias", false)?;
    }
    Ok(frame.plain(length, vec![block(attention, mlp); fields.layers("num_hidden_layers", 32)?]))
}

pub(super) fn mistral(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("mistral", fields, [32_000, 4096], false)?;
    let window = fields.number_or_null("sliding_window", 4096)?;
    let attention = Attention { window, ..attention(fields, frame.size, 32, Some(8))? };
    let mlp = gated(fields, frame.size, 14_336)?;
    Ok(frame.plain(length, vec![block(attention, mlp); fields.layers("num_hidden_layers", 32)?]))
}

pub(super) fn mixtral(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("mixtral", fields, [32_000, 4096], false)?;
    fields.is("router_jitter_noise", 0.0)?;
    let window = fields.number_or_null("sliding_window", 0)?;
    let attention = Attention { window, ..attention(fields, frame.size, 32, Some(8))? };
    let hidden = fields.number("intermediate_size", 14_336)?;
    let mlp = Layer::Experts(experts(fields, frame.size, hidden, [8, 2])?).named("mlp");
    Ok(frame.plain(length, vec![block(attention, mlp); fields.layers("num_hidden_layers", 32)?]))
}

/// Creates experts whose products are grouped, without a shared expert. `defaults` are the number of experts, and the
/// number that each token passes through.
fn experts(fields: Fields<'_>, size: u64, hidden: u64, defaults: [u64; 2]) -> Result<Experts, Error> {
    let count = fields.optional("num_experts")?.or(fields.optional("num_local_experts")?);
    Ok(Experts {
        size,
        hidden,
        experts: count.unwrap_or(defaults[0]),
        per_token: fields.number("num_experts_per_tok", defaults[1])?,
        function: fields.function("hidden_act", "silu")?,
        shared: 0,
        gates_shared: false,
        run: RunExperts::Grouped,
    })
}

/// Returns the window of each layer in Qwen 2 and 3.
fn qwen_windows(fields: Fields<'_>, blocks: usize) -> Result<Vec<u64>, Error> {
    let slides = fields.flag("use_sliding_window", false)?;
    let window = if slides { fields.number_or_null("sliding_window", 4096)? } else { 0 };
    let first = fields.number("max_window_layers", 28)?;
    windows(fields, blocks, window, |at| at as u64 >= first)
}

fn with_windows(attention: &Attention, windows: Vec<u64>) -> impl Iterator<Item = Attention> {
    windows.into_iter().map(|window| Attention { window, ..attention.clone() })
}

pub(super) fn qwen2(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("qwen2", fields, [151_936, 4096], false)?;
    let attention = attention(fields, frame.size, 32, Some(32))?;
    let attention = Attention { no_bias: false, no_output_bias: true, ..attention };
    let mlp = gated(fields, frame.size, 22_016)?;
    let windows = qwen_windows(fields, fields.layers("num_hidden_layers", 32)?)?;
    Ok(frame.plain(length, with_windows(&attention, windows).map(|attention| block(attention, mlp.clone()))))
}

/// Creates the attention of Qwen 3.
fn qwen3_attention(fields: Fields<'_>, size: u64, key_value_heads: u64) -> Result<Attention, Error> {
    let attention = attention(fields, size, 32, Some(key_value_heads))?;
    let no_bias = !fields.flag("attention_bias", false)?;
    Ok(Attention { norm: HeadNorm::Rms, no_bias, ..attention })
}

pub(super) fn qwen3(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("qwen3", fields, [151_936, 4096], false)?;
    let head_size = fields.number("head_dim", 128)?;
    let attention = Attention { head_size, ..qwen3_attention(fields, frame.size, 32)? };
    let mlp = gated(fields, frame.size, 22_016)?;
    let windows = qwen_windows(fields, fields.layers("num_hidden_layers", 32)?)?;
    Ok(frame.plain(length, with_windows(&attention, windows).map(|attention| block(attention, mlp.clone()))))
}

/// Returns a function that returns whether a layer of Qwen's mixtures has experts. The other layers have a plain MLP.
fn has_experts(fields: Fields<'_>) -> Result<impl Fn(usize) -> bool, Error> {
    let step = fields.divisor("decoder_sparse_step", 1)?;
    let plain: HashSet<u64> = fields.numbers("mlp_only_layers")?.unwrap_or_default().into_iter().collect();
    Ok(move |at: usize| (at as u64 + 1).is_multiple_of(step) && !plain.contains(&(at as u64)))
}

pub(super) fn qwen2_moe(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("qwen2_moe", fields, [151_936, 2048], false)?;
    let no_bias = !fields.flag("qkv_bias", true)?;
    let attention = attention(fields, frame.size, 16, Some(16))?;
    let attention = Attention { no_bias, no_output_bias: true, ..attention };
    let experts = Experts {
        shared: fields.divisor("shared_expert_intermediate_size", 5632)?,
        gates_shared: true,
        ..experts(fields, frame.size, fields.number("moe_intermediate_size", 1408)?, [60, 4])?
    };
    let (experts, mlp) = (Layer::Experts(experts).named("mlp"), gated(fields, frame.size, 5632)?);
    let has_experts = has_experts(fields)?;
    let windows = qwen_windows(fields, fields.layers("num_hidden_layers", 24)?)?;
    let blocks = with_windows(&attention, windows).enumerate();
    let blocks =
        blocks.map(|(at, attention)| block(attention, if has_experts(at) { experts.clone() } else { mlp.clone() }));
    Ok(frame.plain(length, blocks))
}

pub(super) fn qwen3_moe(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("qwen3_moe", fields, [151_936, 2048], false)?;
    let slides = fields.flag("use_sliding_window", false)?;
    let window = if slides { fields.number_or_null("sliding_window", 4096)? } else { 0 };
    let attention = Attention { window, ..qwen3_attention(fields, frame.size, 4)? };
    let experts = experts(fields, frame.size, fields.number("moe_intermediate_size", 768)?, [128, 8])?;
    let (experts, mlp) = (Layer::Experts(experts).named("mlp"), gated(fields, frame.size, 6144)?);
    let has_experts = has_experts(fields)?;
    let blocks = (0..fields.layers("num_hidden_layers", 24)?)
        .map(|at| block(attention.clone(), if has_experts(at) { experts.clone() } else { mlp.clone() }));
    Ok(frame.plain(length, blocks))
}

/// Returns the layers of a Gemma model, whose embedding is multiplied by a number.
fn gemma_model(frame: &Frame<'_>, blocks: impl IntoIterator<Item = Vec<Named>>, caps: bool) -> Vec<Named> {
    let head = frame.head(false);
    vec![
        frame.embedding(),
        Layer::Scale.named(""),
        frame.blocks(blocks),
        gemma_norm(&frame.path("norm"), frame.size),
        if caps { inline(vec![head, Layer::SoftCap.named("")]) } else { head },
    ]
}

fn gemma_norm(name: &str, size: u64) -> Named {
    Layer::GemmaNorm { size }.named(name)
}

/// Returns the layers of a block of Gemma 2 or 3, which normalizes before and after attention and MLP.
fn gemma_block(attention: Attention, mlp: Named) -> Vec<Named> {
    let size = attention.size;
    vec![
        residual(vec![
            gemma_norm("input_layernorm", size),
            Layer::Attention(attention).named("self_attn"),
            gemma_norm("post_attention_layernorm", size),
        ]),
        residual(vec![
            gemma_norm("pre_feedforward_layernorm", size),
            mlp,
            gemma_norm("post_feedforward_layernorm", size),
        ]),
    ]
}

fn gemma_attention(fields: Fields<'_>, size: u64, heads: u64, key_value_heads: u64) -> Result<Attention, Error> {
    fields.is("use_bidirectional_attention", false)?;
    let no_bias = !fields.flag("attention_bias", false)?;
    let head_size = fields.number("head_dim", 256)?;
    Ok(Attention { head_size, no_bias, ..attention(fields, size, heads, Some(key_value_heads))? })
}

fn gemma_mlp(fields: Fields<'_>, size: u64, hidden: u64) -> Result<Named, Error> {
    let hidden = fields.number("intermediate_size", hidden)?;
    // Gemma 1 uses the field `hidden_act`, in which `gelu` also meant the form with `tanh`.
    let key = if fields.get("hidden_activation").is_some_and(|value| !value.is_null()) {
        "hidden_activation"
    } else {
        "hidden_act"
    };
    let function = fields.function(key, "gelu_pytorch_tanh")?;
    Ok(Layer::GatedMlp { size, hidden, function, is_joined: false, has_bias: false }.named("mlp"))
}

pub(super) fn gemma(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("gemma", fields, [256_000, 3072], true)?;
    let attention = gemma_attention(fields, frame.size, 16, 16)?;
    let mlp = gemma_mlp(fields, frame.size, 24_576)?;
    let size = frame.size;
    let attention = Layer::Attention(attention).named("self_attn");
    let block = vec![
        residual(vec![gemma_norm("input_layernorm", size), attention]),
        residual(vec![gemma_norm("post_attention_layernorm", size), mlp]),
    ];
    let blocks = vec![block; fields.layers("num_hidden_layers", 28)?];
    Ok(frame.model(length, gemma_model(&frame, blocks, false)))
}

pub(super) fn gemma2(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("gemma2", fields, [256_000, 2304], true)?;
    // `null` means that nothing is capped.
    let caps = |key| fields.get(key).is_none_or(|value| !value.is_null());
    let attention = gemma_attention(fields, frame.size, 8, 4)?;
    // The model requests attention without a fused kernel, because a kernel could not cap the scores.
    let attention = Attention { caps_scores: caps("attn_logit_softcapping"), stores_scores: true, ..attention };
    let mlp = gemma_mlp(fields, frame.size, 9216)?;
    let window = fields.number_or_null("sliding_window", 4096)?;
    let windows = windows(fields, fields.layers("num_hidden_layers", 26)?, window, |at| at % 2 == 0)?;
    let blocks = with_windows(&attention, windows).map(|attention| gemma_block(attention, mlp.clone()));
    Ok(frame.model(length, gemma_model(&frame, blocks, caps("final_logit_softcapping"))))
}

fn gemma3_text(fields: Fields<'_>, frame: &Frame<'_>) -> Result<Vec<Named>, Error> {
    let caps = |key| fields.get(key).is_some_and(|value| !value.is_null());
    let attention = gemma_attention(fields, frame.size, 8, 4)?;
    let caps_scores = caps("attn_logit_softcapping");
    let attention = Attention { norm: HeadNorm::Gemma, caps_scores, ..attention };
    let mlp = gemma_mlp(fields, frame.size, 9216)?;
    let window = fields.number_or_null("sliding_window", 4096)?;
    let pattern = match fields.optional("sliding_window_pattern")? {
        Some(_) => fields.divisor("sliding_window_pattern", 6)?,
        None => fields.divisor("_sliding_window_pattern", 6)?,
    };
    let slides = |at: usize| !(at as u64 + 1).is_multiple_of(pattern);
    let windows = windows(fields, fields.layers("num_hidden_layers", 26)?, window, slides)?;
    let blocks = with_windows(&attention, windows).map(|attention| gemma_block(attention, mlp.clone()));
    Ok(gemma_model(frame, blocks, caps("final_logit_softcapping")))
}

pub(super) fn gemma3(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("gemma3", fields, [262_208, 2304], true)?;
    Ok(frame.model(length, gemma3_text(fields, &frame)?))
}

pub(super) fn gemma3_with_images(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let (text, vision) = (fields.inner("text_config"), fields.inner("vision_config"));
    let is_tied = fields.flag("tie_word_embeddings", true)?;
    let frame = Frame::read("gemma3", text, [262_208, 2304], is_tied)?;
    let frame = Frame { prefix: "model.language_model", ..frame };
    let tower = encoders::siglip(vision, "model.vision_tower")?;
    let size = vision.number("hidden_size", 768)?;
    let projector = vec![
        linear("model.multi_modal_projector", size, frame.size, false),
        gemma_norm("model.multi_modal_projector.mm_soft_emb_norm", size),
    ];
    let idle = Layer::Idle { layers: [tower, projector].concat() }.named("");
    let mut layers = gemma3_text(text, &frame)?;
    layers.insert(0, idle);
    Ok(frame.model(length, layers))
}

/// Returns the number of elements of a head that are rotated. The factor may be in one of two fields.
fn rotated(fields: Fields<'_>, keys: [&str; 2], head_size: u64, default: f64) -> Result<u64, Error> {
    let factor = fields.fraction(keys[0], default)?;
    let factor = fields.inner("rope_parameters").fraction(keys[1], factor)?;
    if !(0.0..=1.0).contains(&factor) {
        return Err(wrong(format!("`{}` is {factor}, which is not between 0 and 1", keys[0])));
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "as `int(...)`"
    )]
    Ok((head_size as f64 * factor) as u64)
}

pub(super) fn phi(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("phi", fields, [51_200, 2048], false)?;
    let size = frame.size;
    let attention = attention(fields, size, 32, None)?;
    let has_norm = fields.flag("qk_layernorm", false)?;
    let mut names = AttentionNames::new(["q_proj", "k_proj", "v_proj", "dense"]);
    names.norms = ["q_layernorm".to_owned(), "k_layernorm".to_owned()];
    let rotated = rotated(fields, ["partial_rotary_factor"; 2], attention.head_size, 0.5)?;
    let norm = if has_norm { HeadNorm::Layer } else { HeadNorm::None };
    let attention = Attention { no_bias: false, rotated, norm, names, ..attention };
    let hidden = fields.derived("intermediate_size", product(&[4, size])?)?;
    let function = fields.function("hidden_act", "gelu_new")?;
    let probability = fields.fraction("resid_pdrop", 0.0)?;
    let first = dropped(vec![Layer::Attention(attention).named("self_attn")], probability);
    let second = dropped(vec![mlp(["mlp.fc1", "mlp.fc2"], size, hidden, function)], probability);
    let branches = Layer::Branches { layers: vec![inline(first), inline(second)] };
    let block = vec![residual(vec![layer_norm("input_layernorm", size), branches.named("")])];
    let blocks = vec![block; fields.layers("num_hidden_layers", 24)?];
    let mut layers = dropped(vec![frame.embedding()], fields.fraction("embd_pdrop", 0.0)?);
    layers.extend([frame.blocks(blocks), layer_norm("model.final_layernorm", size), frame.head(true)]);
    Ok(frame.model(length, layers))
}

pub(super) fn phi3(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("phi3", fields, [32_064, 3072], false)?;
    let size = frame.size;
    fields.is("attention_bias", false)?;
    let attention = attention(fields, size, 32, None)?;
    let rotated = rotated(fields, ["partial_rotary_factor"; 2], attention.head_size, 1.0)?;
    let attention = Attention {
        rotated,
        is_joined: true,
        takes_parts: true,
        window: fields.number_or_null("sliding_window", 0)?,
        ..attention
    };
    let hidden = fields.number("intermediate_size", 8192)?;
    let function = fields.function("hidden_act", "silu")?;
    let probability = fields.fraction("resid_pdrop", 0.0)?;
    let mlp = Layer::GatedMlp { size, hidden, function, is_joined: true, has_bias: false };
    let attention = Layer::Attention(attention).named("self_attn");
    let block = [("input_layernorm", attention), ("post_attention_layernorm", mlp.named("mlp"))]
        .map(|(norm, layer)| residual(dropped(vec![rms_norm(norm, size), layer], probability)))
        .to_vec();
    Ok(frame.plain(length, vec![block; fields.layers("num_hidden_layers", 32)?]))
}

pub(super) fn gpt_neox(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let frame = Frame::read("gpt_neox", fields, [50_432, 6144], false)?;
    let frame = Frame { prefix: "gpt_neox", embedding: "embed_in", ..frame };
    let size = frame.size;
    let attention = attention(fields, size, 64, None)?;
    let head_size = size / attention.heads;
    let attention = Attention {
        key_value_heads: attention.heads,
        head_size,
        no_bias: !fields.flag("attention_bias", true)?,
        rotated: rotated(fields, ["rotary_pct", "partial_rotary_factor"], head_size, 0.25)?,
        is_joined: true,
        names: AttentionNames::joined("query_key_value", "dense"),
        ..attention
    };
    let hidden = fields.number("intermediate_size", 24_576)?;
    let function = fields.function("hidden_act", "gelu")?;
    let probability = fields.fraction("hidden_dropout", 0.0)?;
    let is_parallel = fields.flag("use_parallel_residual", true)?;
    let first = vec![layer_norm("input_layernorm", size), Layer::Attention(attention).named("attention")];
    let names = ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"];
    let second = vec![layer_norm("post_attention_layernorm", size), mlp(names, size, hidden, function)];
    let [first, second] = [first, second].map(|layers| dropped(layers, probability));
    let block = if is_parallel {
        let branches = Layer::Branches { layers: vec![inline(first), inline(second)] };
        vec![residual(vec![branches.named("")])]
    } else {
        vec![residual(first), residual(second)]
    };
    let blocks = vec![block; fields.layers("num_hidden_layers", 44)?];
    let mut layers = dropped(vec![frame.embedding()], probability);
    layers.extend([frame.blocks(blocks), layer_norm("gpt_neox.final_layer_norm", size), frame.head(false)]);
    Ok(frame.model(length, layers))
}

fn llama4_text(fields: Fields<'_>, frame: &Frame<'_>, length: u64) -> Result<Model, Error> {
    let size = frame.size;
    let attention = attention(fields, size, 40, Some(8))?;
    let no_bias = !fields.flag("attention_bias", false)?;
    let head_size = fields.number("head_dim", 128)?;
    let attention = Attention { head_size, no_bias, rotates_complex: true, ..attention };
    let hidden = fields.number("intermediate_size", 8192)?;
    let experts = Experts { shared: hidden, run: RunExperts::All, ..experts(fields, size, hidden, [16, 1])? };
    let hidden = fields.number("intermediate_size_mlp", 16_384)?;
    let function = experts.function;
    let plain = Layer::GatedMlp { size, hidden, function, is_joined: false, has_bias: false };
    let blocks = fields.layers("num_hidden_layers", 48)?;
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
        let mlp = if has_experts(at as u64) { Layer::Experts(experts.clone()) } else { plain.clone() };
        let first = vec![rms_norm("input_layernorm", size), Layer::Attention(attention).named("self_attn")];
        held(first, vec![residual(vec![rms_norm("post_attention_layernorm", size), mlp.named("feed_forward")])])
    });
    Ok(frame.plain(length, blocks))
}

pub(super) fn llama4(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    llama4_text(fields, &Frame::read("llama4", fields, [202_048, 5120], false)?, length)
}

pub(super) fn llama4_with_images(fields: Fields<'_>, length: u64) -> Result<Model, Error> {
    let (text, vision) = (fields.inner("text_config"), fields.inner("vision_config"));
    let frame = Frame::read("llama4", text, [202_048, 5120], false)?;
    let frame = Frame { prefix: "language_model.model", head: "language_model.lm_head", ..frame };
    let mut model = llama4_text(text, &frame, length)?;
    let tower = encoders::llama4_vision(vision, "vision_model")?;
    let outputs = vision.number("vision_output_dim", 7680)?;
    let projector = vec![linear("multi_modal_projector.linear_1", outputs, frame.size, false)];
    model.layers.insert(0, Layer::Idle { layers: [tower, projector].concat() }.named(""));
    Ok(model)
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

//! Hugging Face's `config.json`.

use serde_json::Value;

use crate::{
    error::{Error, Kind},
    model::Model,
    models::Transformer,
};

/// More layers than any model has. A file cannot make this program allocate more.
const MOST_LAYERS: u64 = 100_000;

/// The fields of a configuration.
struct Fields(Value);

impl Fields {
    fn number(&self, key: &str, default: u64) -> Result<u64, Error> {
        match &self.0[key] {
            Value::Null => Ok(default),
            value => value.as_u64().ok_or_else(|| wrong(format!("`{key}` is {value} and not a whole number"))),
        }
    }

    fn layers(&self, key: &str, default: u64) -> Result<usize, Error> {
        let layers = self.number(key, default)?;
        let layers =
            Some(layers).filter(|layers| *layers <= MOST_LAYERS).and_then(|layers| usize::try_from(layers).ok());
        layers.ok_or_else(|| wrong(format!("`{key}` is more than {MOST_LAYERS}")))
    }

    fn fraction(&self, key: &str, default: f64) -> Result<f64, Error> {
        match &self.0[key] {
            Value::Null => Ok(default),
            value => value.as_f64().ok_or_else(|| wrong(format!("`{key}` is {value} and not a number"))),
        }
    }

    /// A setting whose value changes the layers, and must be the one that the builders know.
    fn is(&self, key: &str, known: &Value) -> Result<(), Error> {
        match &self.0[key] {
            Value::Null => Ok(()),
            value if value == known => Ok(()),
            value => Err(wrong(format!("`{key}` is {value}; only {known} is supported"))),
        }
    }
}

fn wrong(what: impl std::fmt::Display) -> Error {
    Kind::Syntax(format!("config.json: {what}")).into()
}

impl Model {
    /// The model of a Hugging Face `config.json`, with sequences of this length. `GPT2LMHeadModel`, `LlamaForCausalLM` and
    /// `BertForMaskedLM` are known. A configuration of another architecture, or with a setting that is not known, is an error.
    pub fn from_config(text: &str, length: u64) -> Result<Self, Error> {
        let fields: Value = serde_json::from_str(text).map_err(|error| wrong(format!("this is no JSON: {error}")))?;
        let architecture = fields["architectures"][0].as_str().unwrap_or_default().to_owned();
        let fields = Fields(fields);
        match architecture.as_str() {
            "GPT2LMHeadModel" => gpt2(&fields, length),
            "LlamaForCausalLM" => llama(&fields, length),
            "BertForMaskedLM" => bert(&fields, length),
            "" => Err(wrong("it names no architecture")),
            other => Err(wrong(format!("the architecture `{other}` is not supported"))),
        }
    }
}

fn gpt2(fields: &Fields, length: u64) -> Result<Model, Error> {
    let size = fields.number("n_embd", 768)?;
    let four_times = size.checked_mul(4).ok_or_else(|| wrong("`n_embd` is too large"))?;
    let heads = fields.number("n_head", 12)?;
    fields.is("activation_function", &"gelu_new".into())?;
    fields.is("tie_word_embeddings", &true.into())?;
    fields.is("add_cross_attention", &false.into())?;
    fields.is("reorder_and_upcast_attn", &false.into())?;
    let dropout = fields.fraction("resid_pdrop", 0.1)?;
    fields.is("embd_pdrop", &dropout.into())?;
    let sizes = Transformer {
        vocabulary: fields.number("vocab_size", 50_257)?,
        size,
        blocks: fields.layers("n_layer", 12)?,
        heads,
        key_value_heads: heads,
        hidden: fields.number("n_inner", four_times)?,
        positions: fields.number("n_positions", 1024)?,
        dropout,
    };
    Ok(sizes.gpt2("gpt2", length))
}

fn llama(fields: &Fields, length: u64) -> Result<Model, Error> {
    let (size, heads) = (fields.number("hidden_size", 4096)?, fields.number("num_attention_heads", 32)?);
    let head_size = size.checked_div(heads).ok_or_else(|| wrong("`num_attention_heads` is 0"))?;
    fields.is("head_dim", &head_size.into())?;
    fields.is("hidden_act", &"silu".into())?;
    fields.is("attention_bias", &false.into())?;
    fields.is("mlp_bias", &false.into())?;
    fields.is("attention_dropout", &0.0.into()).or_else(|_| fields.is("attention_dropout", &0.into()))?;
    let is_tied = fields.0["tie_word_embeddings"].as_bool().unwrap_or(false);
    let sizes = Transformer {
        vocabulary: fields.number("vocab_size", 32_000)?,
        size,
        blocks: fields.layers("num_hidden_layers", 32)?,
        heads,
        key_value_heads: fields.number("num_key_value_heads", heads)?,
        hidden: fields.number("intermediate_size", 11_008)?,
        positions: 0,
        dropout: 0.0,
    };
    Ok(sizes.llama("llama", length, is_tied))
}

fn bert(fields: &Fields, length: u64) -> Result<Model, Error> {
    let heads = fields.number("num_attention_heads", 12)?;
    fields.is("hidden_act", &"gelu".into())?;
    fields.is("type_vocab_size", &2.into())?;
    fields.is("is_decoder", &false.into())?;
    fields.is("tie_word_embeddings", &true.into())?;
    let sizes = Transformer {
        vocabulary: fields.number("vocab_size", 30_522)?,
        size: fields.number("hidden_size", 768)?,
        blocks: fields.layers("num_hidden_layers", 12)?,
        heads,
        key_value_heads: heads,
        hidden: fields.number("intermediate_size", 3072)?,
        positions: fields.number("max_position_embeddings", 512)?,
        dropout: fields.fraction("hidden_dropout_prob", 0.1)?,
    };
    Ok(sizes.bert("bert", length))
}

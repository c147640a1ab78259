//! Hugging Face's `config.json`. Each architecture is built as the Python code of transformers builds it, with the same
//! module names. An unknown setting that changes the layers is an error.

mod architectures;
mod decoders;
mod fields;
mod unknown;

use std::cell::RefCell;

use serde_json::Value;

pub(crate) use self::architectures::torchvision;
use self::fields::{Assumed, Fields, is_zero, wrong};
pub(super) use self::{
    architectures::all,
    unknown::{UnknownDecoder, unknown_decoder},
};
use crate::{Model, Result};

/// The next step in an error message: the supported files.
const READ: &str = "give a `config.json` of Hugging Face, a file .gguf, .safetensors or .toml, or a model as JSON";

/// Sizes that cannot be 0 in any model.
const SIZES: &str = "vocab_size hidden_size intermediate_size num_hidden_layers num_key_value_heads n_embd n_layer d_model \
                     num_layers decoder_sparse_step";

/// Returns an error for settings with which the results of any architecture would be wrong.
fn check(fields: &Value) -> Result<()> {
    if let Some(quantization) = fields.get("quantization_config").filter(|quantization| !quantization.is_null()) {
        let method = quantization["quant_method"].as_str().unwrap_or("unknown");
        let next = "remove the field, and set `quantized` of the step, or use the file of the weights";
        return Err(wrong(format!(
            "the weights are quantized (`quant_method` {method}), which is not supported; {next}"
        )));
    }
    match SIZES.split(' ').find(|size| fields[*size].as_u64() == Some(0)) {
        Some(size) => Err(is_zero(size)),
        None => Ok(()),
    }
}

impl Model {
    /// Reads a model from a Hugging Face `config.json`, for sequences of this length. Other architectures and unknown
    /// settings are errors.
    ///
    /// If a model reads images as well as text, the image part has its parameters but does not run.
    ///
    /// # Errors
    /// Returns an error if the text is not JSON, or if a field is missing, unknown or wrong. The error names the field.
    pub fn from_config(text: &str, length: u64) -> Result<Self> {
        Ok(Self::from_config_with_assumed(text, length)?.0)
    }

    /// Like [`from_config`](Self::from_config), but also returns the numbers that the configuration leaves out.
    pub(super) fn from_config_with_assumed(text: &str, length: u64) -> Result<(Self, Assumed)> {
        let no_json = |error| wrong(format!("this is not JSON: {error}; {READ}"));
        let fields: Value = serde_json::from_str(text).map_err(no_json)?;
        let assumed = RefCell::default();
        let model = Self::build(&fields, length, &assumed)?;
        Ok((model, assumed.into_inner()))
    }

    pub(crate) fn from_fields(fields: &Value, length: u64) -> Result<Self> {
        Self::build(fields, length, &RefCell::default())
    }

    fn build(fields: &Value, length: u64, assumed: &RefCell<Assumed>) -> Result<Self> {
        check(fields)?;
        let name = |value: &Value| value.as_str().map(str::to_owned);
        // The models of diffusers, none of which is known, have their name in another field.
        let class = name(&fields["architectures"][0]).or_else(|| name(&fields["_class_name"]));
        let kind = name(&fields["model_type"]);
        let found = match (&class, &kind) {
            (Some(class), _) => all().find(|known| known.class == *class),
            (None, Some(kind)) => all().find(|known| known.model_type == *kind),
            (None, None) => return Err(wrong(format!("it names no architecture and has no `layers`; {READ}"))),
        };
        let name = class.or(kind).unwrap_or_default();
        let known = || Self::known_architectures().collect::<Vec<_>>().join(", ");
        let unknown = || wrong(format!("the architecture `{name}` is not supported; supported are {}", known()));
        let found = found.ok_or_else(unknown)?;
        let known = &found.model_type;
        if let Some(kind) = fields["model_type"].as_str().filter(|kind| kind != known) {
            return Err(wrong(format!("`{name}` has the `model_type` \"{known}\", and this is \"{kind}\"")));
        }
        architectures::build(found, Fields::new(fields, assumed), length)
    }

    /// Returns the names of the architectures that [`from_config`](Self::from_config) supports.
    pub fn known_architectures() -> impl Iterator<Item = &'static str> {
        all().map(|known| &*known.class)
    }
}

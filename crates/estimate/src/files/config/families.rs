//! The families of models that predict the next token, as data: `families.json`. `decoders.rs` builds a model from a record.
//!
//! To add a family, add its record, which says in what the family differs from another one. `measure/models.py` writes
//! the rows with which `tests/modules.rs` compares its modules with those of transformers.

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::layer::HeadNorm;

/// A family of models: its names, the defaults of its Python class, and the parts of its blocks. Most names are parts of
/// the names of modules in transformers.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub(crate) struct Family {
    /// The Python class, which a `config.json` lists in `architectures`.
    pub(crate) class: String,
    /// The `model_type` of a `config.json`.
    pub(crate) model_type: String,
    /// The name in GGUF files. A family with experts may have the same name there as one without.
    pub(crate) gguf: Option<String>,
    /// The values of fields that a `config.json` leaves out: the defaults of the Python class.
    pub(super) defaults: Map<String, Value>,
    /// Fields that change the layers. They must be false or 0, because anything else is not supported.
    pub(super) off: Vec<String>,

    /// The first part of the names of modules.
    pub(super) prefix: String,
    pub(super) embedding: String,
    /// True if the output of the embedding is multiplied by a number.
    pub(super) scales_embedding: bool,
    /// The field with the dropout after the embedding, if there is one.
    pub(super) embedding_dropout: Option<String>,
    pub(super) last_norm: String,
    pub(super) head_has_bias: bool,

    /// The kind of all norms but those of heads.
    pub(super) norm: HeadNorm,
    /// True if attention and MLP are followed by a norm as well.
    pub(super) norms_outputs: bool,
    pub(super) order: Order,
    /// The field with the dropout after attention and after the MLP, if there is one.
    pub(super) dropout: Option<String>,
    pub(super) mlp: Mlp,
    /// The number of experts if the configuration leaves it out. 0 if blocks have no experts in place of the MLP.
    pub(crate) experts: u64,

    pub(super) attention: String,
    /// The projection of queries, keys and values, if there is one for all of them.
    pub(super) joined: Option<String>,
    /// True if the output of the joined projection is cut into parts one by one, and not by `chunk`.
    pub(super) takes_parts: bool,
    pub(super) output: String,
    /// The field that decides whether the projections have a bias. `None` if they always have one.
    pub(super) bias: Option<String>,
    /// True if the output projection never has a bias.
    pub(super) no_output_bias: bool,
    pub(super) head_norm: HeadNorm,
    /// The field that decides whether there is a head norm. `None` if there always is.
    pub(super) head_norm_field: Option<String>,
    pub(super) head_norms: [String; 2],
    /// The field with the part of a head that is rotated. `None` if all of it is.
    pub(super) rotated: Option<String>,
    pub(super) slides: Slides,
    /// The default of `sliding_window`; 0 for none.
    pub(super) window: u64,
    /// True if scores and logits are limited if the configuration does not have the fields of the limits.
    pub(super) is_capped: bool,
    /// True if the matrix of scores is stored. Gemma 2 limits its scores, which no fused kernel can do.
    pub(super) stores_scores: bool,
}

/// The order of attention and MLP.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// The MLP reads the sum of the input and the output of attention.
    #[default]
    Serial,
    /// Both read the input, after the same norm.
    ParallelWithOneNorm,
    /// Both read the input, each after its own norm, unless this field is false.
    Parallel(String),
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Mlp {
    #[default]
    Gated,
    /// A gated MLP with one projection for the gate and the values.
    GatedJoined,
    /// Two layers with these names.
    Plain([String; 2]),
}

/// The layers that have a window. `layer_types` decides, unless no or all layers have one.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Slides {
    #[default]
    None,
    All,
    /// The layers from `max_window_layers` on.
    Last,
    EverySecond,
    /// All but each n-th layer, where n is `sliding_window_pattern`.
    AllButEach,
}

/// The families, in the order of the file.
pub(crate) static FAMILIES: LazyLock<Vec<Family>> = LazyLock::new(|| {
    let records: Vec<Map<String, Value>> = read(include_str!("families.json"));
    let mut whole: Vec<Map<String, Value>> = Vec::new();
    for mut record in records {
        let mut all = record.remove("like").map_or_else(Map::new, |like| {
            let like = whole.iter().find(|known| known["model_type"] == like);
            like.expect("a family is like one before it").clone()
        });
        for (field, value) in record {
            match (all.get_mut(&field), value) {
                // The defaults are those of the other family, with these changes.
                (Some(Value::Object(defaults)), Value::Object(changed)) => defaults.extend(changed),
                (_, value) => drop(all.insert(field, value)),
            }
        }
        whole.push(all);
    }
    read(&Value::from(whole).to_string())
});

fn read<T: for<'de> Deserialize<'de>>(json: &str) -> T {
    serde_json::from_str(json).expect("`families.json` has records of families")
}

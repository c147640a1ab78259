//! Reads a model from files: its parameters, and the model itself if its architecture is known.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use gpumem_core::model::Bytes;
use serde_json::Value;

use super::{
    Gguf,
    config::{UnknownDecoder, unknown_decoder},
    file_error,
    input::{LONGEST_TEXT, text},
    safetensors,
};
use crate::{
    dtype::Dtype,
    error::{Error, Kind},
    model::Model,
    tensors::Tensors,
};

/// The weight files that a folder may contain. The first one that exists is read.
const WEIGHTS: [&str; 4] = [
    "model.safetensors.index.json",
    "model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
];

/// A model as its files describe it.
///
/// ```no_run
/// # fn main() -> Result<(), gpumem_estimate::Error> {
/// use gpumem_estimate::{Described, Step};
///
/// let files = Described::read("Llama-3.2-1B", 2048)?;
/// println!("{} parameters", files.tensors.sum().elements);
/// match &files.model {
///     Ok(model) => println!("peak: {}", Step::inference(1).estimate(model)?.peak),
///     Err(why) => println!("activations: unknown ({why})"),
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Described {
    /// The parameters in the weight files. If there is only a configuration, these are the parameters of the model. If the architecture is
    /// unknown, they are an estimate from the sizes in the configuration, or the sum in an index of weight files; `notes` then says so.
    pub tensors: Tensors,
    /// The model. If the architecture is not known, this is an error that explains it, and nothing is known about
    /// activations.
    pub model: Result<Model, Error>,
    /// True if the sequences have the length with which the files were read. A model as JSON or TOML defines its own
    /// input.
    pub takes_length: bool,
    /// The type of most parameters. `None` if the files do not contain it, or if it is not known.
    pub dtype: Option<Dtype>,
    /// The name of the type of the parameters in the configuration, if it is not known.
    pub unknown_dtype: Option<String>,
    /// The longest sequences that the model supports. `None` if the files do not contain it. The model may run with
    /// longer ones.
    pub positions: Option<u64>,
    /// The integers that the configuration leaves out, with the values of the Python class, such as a `hidden_size` of
    /// 4096.
    pub assumed: BTreeMap<String, u64>,
    /// Warnings: contradictions between the weight files and the configuration, and parameters that are not exact.
    pub notes: Vec<String>,
}

impl Described {
    /// Reads the headers and configurations at a path, but no weights. The path names a folder as on Hugging Face, a
    /// `.safetensors` file or its index, a `.gguf` file, a `config.json`, or a model as JSON or TOML. Sequences have this
    /// length, unless the file defines it.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or if it has none of these formats. The error names the file.
    pub fn read(path: impl AsRef<Path>, length: u64) -> Result<Self, Error> {
        Self::read_with(path.as_ref(), Length::Exactly(length))
    }

    /// Like [`read`](Self::read), but with shorter sequences if the model does not support this length.
    ///
    /// # Errors
    /// Returns the same errors as [`read`](Self::read).
    pub fn read_up_to(path: impl AsRef<Path>, length: u64) -> Result<Self, Error> {
        Self::read_with(path.as_ref(), Length::UpTo(length))
    }

    fn read_with(path: &Path, length: Length) -> Result<Self, Error> {
        if path.is_dir() {
            return folder(path, length);
        }
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        match extension {
            "gguf" => {
                let file = Gguf::read(path)?;
                let (tensors, positions) = (file.tensors().clone(), file.positions());
                let (dtype, unknown_dtype) = (tensors.dtype(), None);
                let (model, assumed) = (file.model(length.within(positions)), BTreeMap::new());
                let (takes_length, notes) = (true, vec![]);
                Ok(Self { tensors, model, takes_length, dtype, unknown_dtype, positions, assumed, notes })
            }
            "safetensors" => weights(path, &path.with_file_name("config.json"), length),
            "json" if name.ends_with(".safetensors.index.json") => {
                weights(path, &path.with_file_name("config.json"), length)
            }
            "toml" => only(Model::from_toml(&text(path, LONGEST_TEXT)?)?),
            _ => {
                let text = text(path, LONGEST_TEXT)?;
                let fields: Value = serde_json::from_str(&text).unwrap_or_default();
                // A configuration has no field `layers`.
                if fields["layers"].is_array() {
                    drop(fields);
                    return only(Model::from_json(&text)?);
                }
                match Model::from_config_with_assumed(&text, length.within(longest(&fields))) {
                    Ok((model, assumed)) => {
                        let (stored, positions) = (stored_type(&fields), positions(&fields));
                        let dtype = stored.as_ref().and_then(|known| known.as_ref().ok()).copied();
                        let unknown_dtype = stored.and_then(Result::err);
                        let tensors = model.parameters(dtype.unwrap_or_default())?;
                        let (model, takes_length, notes) = (Ok(model), true, vec![]);
                        Ok(Self { tensors, model, takes_length, dtype, unknown_dtype, positions, assumed, notes })
                    }
                    // The weights are known if they are in the same folder.
                    Err(why) => match weights_in(path.parent().unwrap_or(Path::new(""))) {
                        Some(beside) => weights(&beside, path, length),
                        None => of_unknown(&fields, why.clone()).ok_or_else(|| {
                            let why = why.to_string();
                            file_error(path, why.strip_prefix("config.json: ").unwrap_or(&why))
                        }),
                    },
                }
            }
        }
    }
}

/// The length of sequences.
#[derive(Clone, Copy)]
enum Length {
    Exactly(u64),
    /// Shorter sequences are used if the model does not support this length.
    UpTo(u64),
}

impl Length {
    fn within(self, longest: Option<u64>) -> u64 {
        match self {
            Self::Exactly(length) => length,
            Self::UpTo(length) => longest.map_or(length, |longest| longest.min(length)),
        }
    }
}

fn weights_in(folder: &Path) -> Option<PathBuf> {
    WEIGHTS.iter().map(|name| folder.join(name)).find(|path| path.is_file())
}

fn folder(path: &Path, length: Length) -> Result<Described, Error> {
    let config = path.join("config.json");
    if let Some(found) = weights_in(path) {
        return weights(&found, &config, length);
    }
    if config.is_file() {
        return Described::read_with(&config, length);
    }
    Err(file_error(path, "the folder has no `config.json` and no weights in safetensors files"))
}

fn weights(path: &Path, config: &Path, length: Length) -> Result<Described, Error> {
    let is_index = path.extension().is_some_and(|extension| extension == "json");
    let alone = if is_index { safetensors::index_alone(path)? } else { None };
    let read = match alone {
        Some(alone) => Err(alone),
        None => Ok(Tensors::from_safetensors(path)?),
    };
    let unknown = || Kind::Invalid("there is no `config.json` next to the weights".to_owned()).into();
    let config = if config.is_file() { text(config, LONGEST_TEXT) } else { Err(unknown()) };
    let fields: Value = config.as_ref().ok().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let (positions, length) = (positions(&fields), length.within(longest(&fields)));
    let (model, assumed) = match config.and_then(|text| Model::from_config_with_assumed(&text, length)) {
        Ok((model, assumed)) => (Ok(model), assumed),
        Err(why) => (Err(why), BTreeMap::new()),
    };
    let mut notes = Vec::new();
    let stored = stored_type(&fields).and_then(Result::ok);
    let (dtype, unknown_dtype, takes_length) = (read.as_ref().map_or(stored, Tensors::dtype), None, true);
    let built = model.as_ref().ok().and_then(|model| model.parameters(stored.unwrap_or_default()).ok());
    let tensors = match (read, built) {
        (Ok(tensors), built) => {
            let expected = built.map_or(tensors.sum().elements, |built| built.sum().elements);
            if expected != tensors.sum().elements {
                let found = tensors.sum().elements;
                notes.push(format!("the model has {expected} parameters, and the files have {found}"));
            }
            tensors
        }
        (Err(alone), Some(built)) => {
            let (expected, found) = (built.sum().bytes.get(), alone.bytes);
            if expected != found {
                notes.push(format!(
                    "the model of `config.json` has {expected} B of parameters, and the index says {found} B"
                ));
            }
            built
        }
        (Err(alone), None) => {
            notes.push("the files of the index are not here: their sum is what the index says".to_owned());
            if stored.is_none() {
                notes.push("the type of the parameters is not known, so bytes are counted as elements".to_owned());
            }
            alone.as_one(stored.unwrap_or(Dtype::U8))
        }
    };
    Ok(Described { tensors, model, takes_length, dtype, unknown_dtype, positions, assumed, notes })
}

/// Describes a model whose architecture is not known, by the sizes in its configuration.
fn of_unknown(fields: &Value, why: Error) -> Option<Described> {
    let stored = stored_type(fields);
    let dtype = stored.as_ref().and_then(|known| known.as_ref().ok()).copied();
    let UnknownDecoder { weights: tensors, cache, others } = unknown_decoder(fields, dtype.unwrap_or_default())?;
    let without = if others.is_empty() {
        String::new()
    } else {
        format!(", without what these fields describe: {}", others.join(", "))
    };
    let cache = cache.map(|cache| format!("; keys and values take {} for each token", Bytes::new(cache)));
    let about = "the weights are about those of a decoder with the sizes in the file";
    let note = format!("{about}{without}{}", cache.unwrap_or_default());
    let (positions, unknown_dtype) = (positions(fields), stored.and_then(Result::err));
    let (model, assumed, notes, takes_length) = (Err(why), BTreeMap::new(), vec![note], true);
    Some(Described { tensors, model, takes_length, dtype, unknown_dtype, positions, assumed, notes })
}

/// Describes a model as JSON or TOML.
fn only(model: Model) -> Result<Described, Error> {
    let (tensors, model) = (model.parameters(Dtype::default())?, Ok(model));
    let (dtype, unknown_dtype, positions, assumed, notes) = Default::default();
    Ok(Described { tensors, model, takes_length: false, dtype, unknown_dtype, positions, assumed, notes })
}

/// Returns a field of a configuration, or of its text part.
fn field<'a>(config: &'a Value, key: &str) -> &'a Value {
    if config[key].is_null() { &config["text_config"][key] } else { &config[key] }
}

/// Returns the type of the parameters according to a configuration, or its name if it is not a known type of floats.
fn stored_type(config: &Value) -> Option<Result<Dtype, String>> {
    let name = field(config, "dtype").as_str().or(field(config, "torch_dtype").as_str())?;
    Some(name.parse().ok().filter(|dtype: &Dtype| dtype.is_float()).ok_or_else(|| name.to_owned()))
}

fn positions(config: &Value) -> Option<u64> {
    field(config, "max_position_embeddings").as_u64()
}

/// Returns the length above which the model of a configuration cannot be built, because it trains its positions.
fn longest(config: &Value) -> Option<u64> {
    let named = ["n_positions", "max_target_positions"].iter().find_map(|key| field(config, key).as_u64());
    named.or_else(|| positions(config)).or_else(|| match config["model_type"].as_str()? {
        // The defaults of the Python classes.
        "clip" => Some(77),
        "whisper" => Some(448),
        _ => None,
    })
}

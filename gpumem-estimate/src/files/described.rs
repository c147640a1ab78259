//! What files say about a model: its parameters, and the model itself if its architecture is known.

use std::{fs::File, io::Read, path::Path};

use serde_json::Value;

use super::{Gguf, Tensors, refused};
use crate::{
    dtype::Dtype,
    error::{Error, Kind},
    model::Model,
};

/// The longest configuration or model that is read.
const LONGEST_TEXT: u64 = 100_000_000;

/// The files with weights that a folder may have, in the order in which they are looked for.
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
    /// The parameters: those of the files with weights, or those of the model where there is only its configuration.
    pub tensors: Tensors,
    /// The model. Where the architecture is not known, the error says so, and nothing is known about activations.
    pub model: Result<Model, Error>,
    /// What the files with weights and the configuration say differently.
    pub notes: Vec<String>,
}

impl Described {
    /// Reads the headers and configurations at a path, and no weights. The path is that of a folder as Hugging Face has it, of a
    /// `.safetensors` file or its index, of a `.gguf` file, of a `config.json`, or of a model as JSON or TOML. Sequences have
    /// this length, unless the file says it.
    pub fn read(path: impl AsRef<Path>, length: u64) -> Result<Self, Error> {
        let path = path.as_ref();
        if path.is_dir() {
            return folder(path, length);
        }
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        match extension {
            "gguf" => {
                let file = Gguf::read(path)?;
                Ok(Self { tensors: file.tensors().clone(), model: file.model(length), notes: vec![] })
            }
            "safetensors" => weights(path, &path.with_file_name("config.json"), length),
            "json" if name.ends_with(".safetensors.index.json") => {
                weights(path, &path.with_file_name("config.json"), length)
            }
            "toml" => only(Model::from_toml(&text(path)?)?, Dtype::F32),
            _ => {
                let text = text(path)?;
                // A configuration has no layers.
                if serde_json::from_str::<Value>(&text).is_ok_and(|value| value["layers"].is_array()) {
                    return only(Model::from_json(&text)?, Dtype::F32);
                }
                only(Model::from_config(&text, length)?, stored_type(&text))
            }
        }
    }
}

fn folder(path: &Path, length: u64) -> Result<Described, Error> {
    let config = path.join("config.json");
    if let Some(found) = WEIGHTS.iter().map(|name| path.join(name)).find(|path| path.is_file()) {
        return weights(&found, &config, length);
    }
    if config.is_file() {
        return Described::read(config, length);
    }
    Err(refused(path, "the folder has no `config.json` and no weights in safetensors files"))
}

fn weights(path: &Path, config: &Path, length: u64) -> Result<Described, Error> {
    let tensors = Tensors::from_safetensors(path)?;
    let unknown = || Kind::Invalid("there is no `config.json` beside the weights".to_owned()).into();
    let model =
        if config.is_file() { text(config).and_then(|text| Model::from_config(&text, length)) } else { Err(unknown()) };
    let mut notes = Vec::new();
    if let Ok(built) = model.as_ref().map_err(Clone::clone).and_then(|model| model.parameters(Dtype::F32)) {
        let (expected, found) = (built.sum().elements, tensors.sum().elements);
        if expected != found {
            notes.push(format!("the model has {expected} parameters, and the files have {found}"));
        }
    }
    Ok(Described { tensors, model, notes })
}

/// A model without files for its weights.
fn only(model: Model, dtype: Dtype) -> Result<Described, Error> {
    Ok(Described { tensors: model.parameters(dtype)?, model: Ok(model), notes: vec![] })
}

/// The type of the parameters that a configuration names.
fn stored_type(config: &str) -> Dtype {
    let fields: Value = serde_json::from_str(config).unwrap_or_default();
    let name = fields["dtype"].as_str().or(fields["torch_dtype"].as_str());
    match name {
        Some("bfloat16") => Dtype::Bf16,
        Some("float16") => Dtype::F16,
        _ => Dtype::F32,
    }
}

fn text(path: &Path) -> Result<String, Error> {
    let file = File::open(path).map_err(|error| refused(path, error))?;
    let mut text = String::new();
    file.take(LONGEST_TEXT + 1).read_to_string(&mut text).map_err(|error| refused(path, error))?;
    if text.len() as u64 > LONGEST_TEXT {
        return Err(refused(path, format!("a text of more than {LONGEST_TEXT} bytes")));
    }
    Ok(text)
}

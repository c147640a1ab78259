//! Reads a model from files: its parameters, and the model itself if its architecture is known.

use std::{
    collections::BTreeMap,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::{
    Gguf, LONGEST_TEXT,
    config::{UnknownDecoder, unknown_decoder},
    file_error, safetensors, text,
};
use crate::{Bytes, Dtype, Error, Model, Result, Shape, TensorInfo, Tensors};

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
    pub model: Result<Model>,
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
    /// Two decoders with the sizes in a configuration whose architecture is not known. One computes attention in one kernel, and the
    /// other one stores its scores. The peak of the model is about between theirs, if it has no other parts.
    pub stand_ins: Option<[Model; 2]>,
}

impl Described {
    /// Reads the headers and configurations at a path, but no weights. The path names a folder as on Hugging Face, a
    /// `.safetensors` file or its index, a `.gguf` file, a `config.json`, or a model as JSON or TOML. Sequences have this
    /// length, unless the file defines it.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or if it has none of these formats. The error names the file.
    pub fn read(path: impl AsRef<Path>, length: u64) -> Result<Self> {
        Self::read_with(path.as_ref(), &|_| length)
    }

    /// Like [`read`](Self::read), but with shorter sequences if the model does not support this length.
    ///
    /// # Errors
    /// Returns the same errors as [`read`](Self::read).
    pub fn read_up_to(path: impl AsRef<Path>, length: u64) -> Result<Self> {
        Self::read_with(path.as_ref(), &|longest| longest.map_or(length, |longest| longest.min(length)))
    }

    fn read_with(path: &Path, length: Length<'_>) -> Result<Self> {
        if path.is_dir() {
            return folder(path, length);
        }
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        match path.extension().and_then(|extension| extension.to_str()).unwrap_or_default() {
            "gguf" => {
                let file = Gguf::read(path)?;
                let (tensors, positions) = (file.tensors().clone(), file.positions());
                let (dtype, model) = (tensors.dtype(), file.model(length(positions)));
                Ok(Self { dtype, positions, ..Self::new(tensors, model) })
            }
            extension if extension == "safetensors" || name.ends_with(".safetensors.index.json") => {
                weights(path, &path.with_file_name("config.json"), length)
            }
            "toml" => Self::of_model(Model::from_toml(&text(path, LONGEST_TEXT)?)?),
            _ => {
                let text = text(path, LONGEST_TEXT)?;
                let (fields, mut described) = configured(Ok(&text), length);
                // A configuration has no field `layers`.
                if fields["layers"].is_array() {
                    drop((fields, described));
                    return Self::of_model(Model::from_json(&text)?);
                }
                match &described.model {
                    Ok(model) => described.tensors = model.parameters(described.dtype.unwrap_or_default())?,
                    Err(why) => {
                        // The weights are known if they are in the same folder.
                        if let Some(beside) = weights_in(path.parent().unwrap_or(Path::new(""))) {
                            return weights(&beside, path, length);
                        }
                        let why = why.to_string();
                        let why = why.strip_prefix("config.json: ").unwrap_or(&why);
                        described.stand_in(&fields, length).ok_or_else(|| file_error(path, why))?;
                    }
                }
                Ok(described)
            }
        }
    }

    fn new(tensors: Tensors, model: Result<Model>) -> Self {
        let (dtype, unknown_dtype, positions, assumed, notes, stand_ins) = Default::default();
        Self { tensors, model, takes_length: true, dtype, unknown_dtype, positions, assumed, notes, stand_ins }
    }

    /// Describes a model whose architecture is not known, by its sizes. `None` if they are not those of a decoder.
    fn stand_in(&mut self, fields: &Value, length: Length<'_>) -> Option<()> {
        let UnknownDecoder { weights, cache, others, stand_ins } = self.unknown(fields, length)?;
        let without = if others.is_empty() {
            String::new()
        } else {
            format!(", without what these fields describe: {}", others.into_iter().collect::<Vec<_>>().join(", "))
        };
        let cache = cache.map(|cache| format!("; keys and values take {} for each token", Bytes::new(cache)));
        let about = "the weights are about those of a decoder with the sizes in the file";
        self.notes.push(format!("{about}{without}{}", cache.unwrap_or_default()));
        (self.tensors, self.stand_ins) = (weights, Some(stand_ins));
        Some(())
    }

    fn unknown(&self, fields: &Value, length: Length<'_>) -> Option<UnknownDecoder> {
        unknown_decoder(fields, self.dtype.unwrap_or_default(), length(self.positions))
    }

    /// Describes a model as JSON or TOML.
    fn of_model(model: Model) -> Result<Self> {
        Ok(Self { takes_length: false, ..Self::new(model.parameters(Dtype::default())?, Ok(model)) })
    }
}

/// Returns the length of sequences. The argument is the longest length that the model supports, if it is known.
type Length<'a> = &'a dyn Fn(Option<u64>) -> u64;

/// Describes a model by its `config.json`, without its tensors. Also returns the fields, which are all missing without one.
fn configured(text: Result<&str>, length: Length<'_>) -> (Value, Described) {
    let fields: Value = text.as_ref().ok().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let field = |key: &str| if fields[key].is_null() { &fields["text_config"][key] } else { &fields[key] };
    let positions = field("max_position_embeddings").as_u64();
    // The model cannot be built for longer sequences, because it trains its positions.
    let longest = ["n_positions", "max_target_positions"].iter().find_map(|key| field(key).as_u64());
    let longest = longest.or(positions).or_else(|| match fields["model_type"].as_str()? {
        // The defaults of the Python classes.
        "clip" => Some(77),
        "whisper" => Some(448),
        _ => None,
    });
    let named = ["dtype", "torch_dtype"].map(field).into_iter().find(|value| !value.is_null());
    let dtype = named.and_then(|name| name.as_str()?.parse().ok()).filter(|dtype: &Dtype| dtype.is_float());
    let unknown_dtype = named.filter(|_| dtype.is_none());
    let unknown_dtype = unknown_dtype.map(|name| name.as_str().map_or_else(|| name.to_string(), str::to_owned));
    let model = text.and_then(|text| Model::from_config_with_assumed(text, length(longest)));
    let (model, assumed) = model.map_or_else(|why| (Err(why), BTreeMap::new()), |(model, all)| (Ok(model), all));
    let described = Described::new(Tensors::default(), model);
    (fields, Described { dtype, unknown_dtype, positions, assumed, ..described })
}

fn weights_in(folder: &Path) -> Option<PathBuf> {
    WEIGHTS.iter().map(|name| folder.join(name)).find(|path| path.is_file())
}

fn folder(path: &Path, length: Length<'_>) -> Result<Described> {
    let config = path.join("config.json");
    if let Some(found) = weights_in(path) {
        return weights(&found, &config, length);
    }
    match config.metadata() {
        Ok(_) => Described::read_with(&config, length),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(file_error(path, "the folder has no `config.json` and no weights in safetensors files"))
        }
        Err(error) => Err(file_error(&config, error)),
    }
}

fn weights(path: &Path, config: &Path, length: Length<'_>) -> Result<Described> {
    let is_index = path.extension().is_some_and(|extension| extension == "json");
    let alone = if is_index { safetensors::index_alone(path)? } else { None };
    let unknown = || Error::invalid("there is no `config.json` next to the weights");
    let config = if config.is_file() { text(config, LONGEST_TEXT) } else { Err(unknown()) };
    let (fields, mut described) = configured(config.as_deref().map_err(Clone::clone), length);
    let stored = described.dtype;
    let built = described.model.as_ref().ok().and_then(|model| model.parameters(stored.unwrap_or_default()).ok());
    let mut note = |note: String| described.notes.push(note);
    described.tensors = match (alone, built) {
        (None, built) => {
            let tensors = Tensors::from_safetensors(path)?;
            let found = tensors.sum().elements;
            let expected = built.map_or(found, |built| built.sum().elements);
            if expected != found {
                note(format!("the model has {expected} parameters, and the files have {found}"));
            }
            described.dtype = tensors.dtype();
            tensors
        }
        (Some((found, _)), Some(built)) => {
            let expected = built.sum().bytes.get();
            if expected != found {
                note(format!(
                    "the model of `config.json` has {expected} B of parameters, and the index says {found} B"
                ));
            }
            built
        }
        (Some((bytes, count)), None) => {
            note("the files of the index are not here: their sum is what the index says".to_owned());
            if stored.is_none() {
                note("the type of the parameters is not known, so bytes are counted as elements".to_owned());
            }
            // One tensor stands for all tensors, because the index does not contain their sizes.
            let dtype = stored.unwrap_or(Dtype::U8);
            let (name, shape) = (format!("{count} tensors"), Shape::from([bytes / dtype.bytes(1).unwrap_or(1).max(1)]));
            Tensors::new(vec![TensorInfo { name, dtype, shape, bytes: Bytes::new(bytes) }])
        }
    };
    described.unknown_dtype = None;
    // The weights are known, and the rest is about that of a decoder with the sizes of the configuration.
    if described.model.is_err() {
        described.stand_ins = described.unknown(&fields, length).map(|unknown| unknown.stand_ins);
    }
    Ok(described)
}

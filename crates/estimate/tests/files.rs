//! Tests files on disk, and files that are cut off or claim a wrong length.

use std::{fs, path::PathBuf};

use gpumem_estimate::{Described, Dtype, Model, Step, Tensors, models};
use serde_json::json;
use tempfile::TempDir;

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Writes the two files of a model.
    fn with_parts() -> Self {
        let folder = Self::new();
        folder.write("1.safetensors", &safetensors(FIRST, 32));
        folder.write("2.safetensors", &safetensors(SECOND, 6));
        folder
    }

    /// Writes an index, which maps tensors to files.
    fn index(&self, map: &str) -> PathBuf {
        self.write("model.safetensors.index.json", format!(r#"{{"weight_map":{map}}}"#).as_bytes())
    }
}

pub(crate) fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

const FIRST: &str = r#"{"model.a.weight":{"dtype":"BF16","shape":[4,2],"data_offsets":[0,16]},
    "model.a.bias":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}"#;
const SECOND: &str = r#"{"model.b.weight":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]}}"#;

const ALL: &str =
    r#"{"model.a.weight":"1.safetensors","model.a.bias":"1.safetensors","model.b.weight":"2.safetensors"}"#;

#[test]
fn an_index_names_several_files() {
    let folder = Folder::with_parts();
    let tensors = Tensors::from_safetensors(folder.index(ALL)).unwrap();
    assert_eq!((tensors.all().len(), tensors.sum().elements), (3, 15));
    let error = |map: &str| Tensors::from_safetensors(folder.index(map)).unwrap_err().to_string();
    assert!(error(r#"{"x":"2.safetensors"}"#).ends_with("the files do not have the tensor `x`"));
    for name in ["../2.safetensors", "/etc/passwd", "a/b", ""] {
        let message = error(&format!(r#"{{"x":"{name}"}}"#));
        assert!(message.ends_with(&format!("`{name}` is not the name of a file next to the index")), "{message}");
    }
    assert!(error(r#"{"x":"3.safetensors"}"#).contains("3.safetensors: "));
}

/// Only the small files of the model were downloaded.
#[test]
fn an_index_without_its_files_has_their_sum() {
    const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}"#;
    let model = Model::from_config(CONFIG, 16).unwrap().parameters(Dtype::Bf16).unwrap().sum();
    let folder = Folder::new();
    let index = |size: &str| {
        folder.index(&format!(r#"{{"a":"1.safetensors","b":"2.safetensors"}},"metadata":{{"total_size":{size}}}"#))
    };
    // Without a configuration, only the bytes are known.
    let alone = Described::read(index("1000"), 16).unwrap();
    assert_eq!(alone.tensors.sum().bytes.get(), 1000);
    assert!(alone.model.is_err() && alone.dtype.is_none() && alone.notes.len() == 2, "{:?}", alone.notes);
    folder.write("config.json", CONFIG.replace("Llama", "Unknown").replace("llama", "unknown").as_bytes());
    let typed = Described::read(index("1000.0"), 16).unwrap();
    let sum = typed.tensors.sum();
    assert_eq!((sum.elements, sum.bytes.get(), typed.dtype), (500, 1000, Some(Dtype::Bf16)));
    assert!(typed.stand_ins.is_some() && alone.stand_ins.is_none());
    // The configuration describes the tensors.
    folder.write("config.json", CONFIG.as_bytes());
    let known = Described::read(index(&model.bytes.get().to_string()), 16).unwrap();
    assert!(known.model.is_ok() && known.notes.is_empty(), "{:?}", known.notes);
    assert_eq!(known.tensors.sum(), model);
    let more = Described::read(index("123456789"), 16).unwrap();
    assert!(more.notes[0].ends_with("and the index says 123456789 B"), "{:?}", more.notes);
    // A part of the files is not the model.
    folder.write("1.safetensors", &safetensors(FIRST, 32));
    let error = Described::read(index("1000"), 16).unwrap_err().to_string();
    assert!(error.contains("2.safetensors: "), "{error}");
    // Without the sum, nothing is known.
    for size in ["null", "-1", "1e300"] {
        std::fs::remove_file(folder.0.path().join("1.safetensors")).ok();
        assert!(Described::read(index(size), 16).is_err(), "{size}");
    }
}

/// The sizes are those of two public models. The file of the second one has another layer, for the prediction of the second next token.
#[test]
fn an_unknown_decoder_has_about_the_weights_of_a_known_one() {
    let described = |config: &str| Described::read(Folder::new().write("config.json", config.as_bytes()), 4096);
    let granite = r#"{"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "hidden_size": 1024, "intermediate_size": 512,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 8,
        "vocab_size": 49155, "tie_word_embeddings": true, "torch_dtype": "bfloat16"}"#;
    let found = described(granite).unwrap();
    assert_eq!(found.tensors.sum().elements, 1_334_628_352);
    assert_eq!((found.model.is_err(), found.dtype), (true, Some(Dtype::Bf16)));
    let note = "the weights are about those of a decoder with the sizes in the file";
    assert_eq!(found.notes, [format!("{note}; keys and values take 48 KiB for each token")]);
    let peak = |model: &Model| Step { parameters: Dtype::Bf16, ..Step::inference(1) }.estimate(model).unwrap().peak;
    let [low, high] = found.stand_ins.unwrap();
    assert!(peak(&low).get() > found.tensors.sum().bytes.get() && peak(&low) < peak(&high));

    let mimo = r#"{"architectures": ["MiMoForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": true, "vocab_size": 151680,
        "tie_word_embeddings": false, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"}"#;
    let found = described(mimo).unwrap();
    assert_eq!(found.tensors.sum().bytes.get(), 15_245_238_272);
    let fields = format!("{note}, without what these fields describe: num_nextn_predict_layers; ");
    assert!(found.notes[0].starts_with(&fields), "{:?}", found.notes);
    // Sizes inside of another part, and layers that keep no keys and values.
    let inside = format!(r#"{{"architectures": ["X"], "vision_config": {{}}, "text_config": {mimo}}}"#);
    assert_eq!(described(&inside).unwrap().tensors.sum(), found.tensors.sum());
    let linear = described(&granite.replace("\"vocab_size\"", "\"linear_key_head_dim\": 128, \"vocab_size\"")).unwrap();
    assert!(!linear.notes[0].contains("keys and values"), "{:?}", linear.notes);

    // Other models, quantized weights, and known architectures with wrong sizes are errors.
    for (from, to) in [
        ("\"hidden_size\": 1024, ", ""),
        ("\"intermediate_size\": 512,", ""),
        ("\"vocab_size\": 49155", "\"vocab_size\": 18446744073709551615"),
        ("\"num_hidden_layers\": 24", "\"num_hidden_layers\": 4000000"),
        ("\"torch_dtype\"", "\"quantization_config\": {\"quant_method\": \"gptq\"}, \"torch_dtype\""),
        ("GraniteMoeForCausalLM", "LlamaForCausalLM"),
    ] {
        let changed = granite.replace(from, to);
        assert!(changed != granite && described(&changed).is_err(), "{from}");
    }
}

#[test]
fn files_that_lie_about_their_length_are_errors() {
    let folder = Folder::new();
    let error = |bytes: &[u8]| Tensors::from_safetensors(folder.write("a.safetensors", bytes)).unwrap_err().to_string();
    assert!(error(b"").ends_with("it is empty"));
    assert!(error(&safetensors(FIRST, 32)[..20]).ends_with("the file ends inside its header"));
    let mut huge = safetensors(FIRST, 32);
    huge[..8].copy_from_slice(&(1_u64 << 60).to_le_bytes());
    assert!(error(&huge).ends_with("a header of 1152921504606846976 bytes; at most 100000000 are allowed"));
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(error(&huge).contains("a header of 18446744073709551615 bytes"));
    let header_only = folder.write("b.safetensors", &safetensors(FIRST, 0));
    assert_eq!(Tensors::from_safetensors(header_only).unwrap().sum().bytes.get(), 32);
    assert!(Tensors::from_safetensors(folder.0.path().join("none.safetensors")).is_err());
}

/// Returns the header of a file with the weights of a model in `bf16`, and the length of the data that would follow.
fn weights_of(model: &Model) -> (String, usize) {
    let (mut end, mut entries) = (0, serde_json::Map::new());
    for (number, tensor) in model.parameters(Dtype::Bf16).unwrap().all().iter().enumerate() {
        let start = end;
        end += tensor.bytes.get();
        let entry = json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]});
        entries.insert(format!("{}.{number}", tensor.name), entry);
    }
    (json!(entries).to_string(), usize::try_from(end).unwrap())
}

const ALL_TYPES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gguf/all_types.gguf");
const CONFIG: &str =
    r#"{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 32}"#;

#[test]
fn a_folder_describes_a_model() {
    let folder = Folder::new();
    let none = Described::read(&folder.0, 16).unwrap_err().to_string();
    assert!(none.ends_with("the folder has no `config.json` and no weights in safetensors files"), "{none}");
    let config = folder.0.path().join("config.json");
    std::os::unix::fs::symlink("/dev/zero", &config).unwrap();
    let endless = Described::read(&folder.0, 16).unwrap_err().to_string();
    assert!(endless.ends_with("config.json: it is not a regular file"), "{endless}");
    std::fs::remove_file(&config).unwrap();
    folder.write("config.json", CONFIG.replace('}', r#", "torch_dtype": "bfloat16"}"#).as_bytes());
    let only_config = Described::read(&folder.0, 16).unwrap();
    let model = only_config.model.unwrap();
    assert_eq!(only_config.tensors, model.parameters(Dtype::Bf16).unwrap());
    let (header, data) = weights_of(&model);
    let file = folder.write("model.safetensors", &safetensors(&header, data));
    let both = Described::read(&folder.0, 16).unwrap();
    assert_eq!(both.tensors.sum(), only_config.tensors.sum());
    assert_eq!((both.model.as_ref(), &both.notes), (Ok(&model), &vec![]));
    assert_eq!(Described::read(&file, 16).unwrap(), both);
    assert!(Step::inference(1).estimate(&both.model.unwrap()).is_ok());
    // A configuration of another model is noticed.
    folder.write("config.json", CONFIG.replace("50", "51").as_bytes());
    let other = Described::read(&folder.0, 16).unwrap();
    let elements = both.tensors.sum().elements;
    let expected = format!("the model has {} parameters, and the files have {elements}", elements + 64);
    assert_eq!(other.notes, [expected]);
}

/// The parameters of an unknown architecture are known, but nothing else is.
#[test]
fn an_unknown_architecture_has_parameters_and_no_model() {
    let folder = Folder::with_parts();
    let index = folder.index(ALL);
    let no_config = Described::read(&index, 16).unwrap();
    assert_eq!(no_config.model.unwrap_err().to_string(), "there is no `config.json` next to the weights");
    folder.write("config.json", br#"{"architectures": ["NewLM"]}"#);
    let unknown = Described::read(&folder.0, 16).unwrap();
    assert_eq!(unknown.tensors.sum().elements, 15);
    assert_eq!(unknown.tensors.by_module(2).len(), 2);
    let why = unknown.model.unwrap_err().to_string();
    assert!(why.starts_with("config.json: the architecture `NewLM` is not supported; supported are Llama"), "{why}");
    // The weights are also found next to their configuration.
    let beside = Described::read(folder.0.path().join("config.json"), 16).unwrap();
    assert_eq!(beside.tensors, unknown.tensors);
    assert_eq!(beside.model.unwrap_err().to_string(), why);
    // Nothing is known without weights.
    std::fs::remove_file(index).unwrap();
    assert!(Described::read(folder.0.path().join("config.json"), 16).is_err());
    let other = folder.write("other.json", b"[]");
    let error = Described::read(&other, 16).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: it names no architecture", other.display())), "{error}");
}

/// A value that is not in the files stays unknown.
#[test]
fn the_type_and_the_positions_are_those_of_the_files() {
    let folder = Folder::new();
    for (fields, expected) in [
        ("", (None, None)),
        (r#", "torch_dtype": "bfloat16""#, (Some(Dtype::Bf16), None)),
        (r#", "dtype": "float16", "torch_dtype": "bfloat16""#, (Some(Dtype::F16), None)),
        (r#", "torch_dtype": "float32""#, (Some(Dtype::F32), None)),
        (r#", "torch_dtype": [1, 2]"#, (None, None)),
        (r#", "torch_dtype": "auto", "max_position_embeddings": 8192"#, (None, Some(8192))),
    ] {
        let config = CONFIG.replace('}', &format!("{fields}}}"));
        // Programs on Windows start a text with this mark.
        let file = folder.write("config.json", format!("\u{feff}{config}").as_bytes());
        let found = Described::read(file, 16).unwrap();
        assert_eq!((found.dtype, found.positions), expected, "{fields}");
        assert_eq!(found.unknown_dtype.is_some(), fields.contains('[') || fields.contains("auto"), "{fields}");
    }
    // Most elements of this file have blocks of 4 bits.
    let found = Described::read(ALL_TYPES, 16).unwrap();
    assert!(found.dtype.is_some() && found.positions.is_none() && found.model.is_err());
    assert!(found.tensors.all().len() > 30);
}

/// The reader does not wait for a pipe, and does not read a file without end.
#[test]
fn what_is_no_regular_file_and_what_is_too_long_is_rejected() {
    let folder = Folder::new();
    let error = |path: &std::path::Path| Described::read(path, 16).unwrap_err().to_string();
    let pipe = folder.0.path().join("pipe.json");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let others = ["model.json", "model.toml", "model.gguf", "model.safetensors", "model.safetensors.index.json"];
    for (to, names) in [("/dev/zero", &others[..]), (pipe.to_str().unwrap(), &others[..])] {
        for name in names {
            let link = folder.0.path().join(name);
            std::os::unix::fs::symlink(to, &link).unwrap();
            assert!(error(&link).ends_with(": it is not a regular file"), "{name}: {}", error(&link));
            fs::remove_file(link).unwrap();
        }
    }
    // The pipe is the second file of an index. Then `/dev/zero` is given as a step.
    folder.write("1.safetensors", &safetensors(FIRST, 32));
    std::os::unix::fs::symlink(&pipe, folder.0.path().join("2.safetensors")).unwrap();
    assert!(error(&folder.index(ALL)).ends_with("2.safetensors: it is not a regular file"));
    let step = |path: &std::path::Path| Step::read(path).unwrap_err().to_string();
    assert_eq!(step(std::path::Path::new("/dev/zero")), "/dev/zero: it is not a regular file");
    // The file is longer than any configuration, model or step.
    for (name, length) in
        [("long.json", 4_000_001), ("long.toml", 4_000_001), ("long.safetensors.index.json", 40_000_001)]
    {
        let long = folder.0.path().join(name);
        fs::File::create(&long).unwrap().set_len(length).unwrap();
        let expected = format!("it has more than {} bytes, and no such file needs that many", length - 1);
        assert!(error(&long).ends_with(&expected), "{}", error(&long));
        assert!(step(&long).ends_with("it has more than 65536 bytes, and no such file needs that many"));
    }
    for (text, why) in [
        (r#"{"bach": 8}"#, "unknown field `bach`"),
        (r#"{"batch": 8, "checkpointing": true}"#, "`checkpointing`: invalid type: boolean `true`"),
        (r#"{"batch": -1}"#, "`batch`: invalid value: integer `-1`"),
        (r#"{"batch": 1, "batch": 2}"#, "duplicate field `batch`"),
        ("[]", "invalid type: sequence, expected a map"),
    ] {
        let wrong = folder.write("step.json", text.as_bytes());
        assert!(step(&wrong).contains(&format!("step.json: {why}")), "{}", step(&wrong));
    }
    assert_eq!(Step::read(folder.write("good.json", br#"{"batch": 8}"#)).unwrap(), Step::inference(8));
}

#[test]
fn models_are_read_from_their_own_files() {
    let folder = Folder::new();
    let model = models::torchvision("mobilenet_v2").unwrap();
    let json = folder.write("model.json", model.to_json().unwrap().as_bytes());
    assert_eq!(Described::read(json, 16).unwrap().model, Ok(model));
    let toml =
        "name = \"a\"\ninput = { tokens = 4 }\nlayers = [{ name = \"e\", type = \"embedding\", rows = 3, size = 2 }]";
    let found = Described::read(folder.write("model.toml", toml.as_bytes()), 16).unwrap();
    assert_eq!((found.tensors.sum().elements, found.tensors.sum().bytes.get()), (6, 24));
    assert!(Described::read(folder.0.path().join("none.json"), 16).is_err());
    assert!(Described::read(folder.write("bad.json", b"\xff\xfe"), 16).is_err());
}

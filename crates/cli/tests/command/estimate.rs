//! Tests `gpumem estimate`.

use std::fs;

use gpumem_core::model::Bytes;
use serde_json::Value;

use crate::{
    Ran, file, ran,
    report::{json, printed, written},
};

const CONFIG: &[u8] = br#"{"model_type": "gpt2", "n_layer": 2}"#;

fn safetensors(dtype: &str) -> Vec<u8> {
    let header = format!(r#"{{"net.0.weight":{{"dtype":"{dtype}","shape":[2,4],"data_offsets":[0,32]}}}}"#);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + 32, 0);
    bytes
}

#[test]
fn the_peak_what_fits_and_what_would_save() {
    let config = written("estimate-config.json", CONFIG);
    let arguments = ["estimate", &config, "--train", "adam", "--batch", "4", "--length", "64"];
    let text = printed(&[&arguments[..], &["--savings", "--fit", "8GB", "--context", "1GiB"]].concat());
    assert!(text.starts_with("the estimated peak is "), "the answer comes first: {text}");
    let what = "\ngpt2: training, 4 inputs of 64 tokens\nparameters in f32, because the file names none\n";
    assert!(text.contains(what), "{text}");
    for part in
        ["\n at the peak, by class ", "\n one change ", "\n checkpointing of each block ", " 53,561,088 parameters"]
    {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let fit = "\nwith 8 GiB: the CUDA context and libraries take 1 GiB, and 2 % stay free\n  the largest batch is ";
    assert!(text.contains(fit), "{text}");
    // The largest batch depends on the length, and the longest inputs depend on the batch.
    let batch = text.split("\n  the largest batch is ").nth(1).and_then(|rest| rest.lines().next());
    assert!(batch.is_some_and(|batch| batch.ends_with(" inputs of 64 tokens")), "{text}");
    assert!(
        text.contains("\n  the longest inputs of a batch of 4 have 1024 tokens (all of its positions)\n"),
        "{text}"
    );
    let is_long = |line: &str| line.chars().count() > 80 && !line.starts_with("not in the file, ");
    assert!(!text.lines().any(is_long), "{text}");
    assert!(printed(&["estimate", &config, "--length", "1"]).contains("\ngpt2: inference, 1 input of 1 token\n"));
}

#[test]
fn json_has_the_same_numbers() {
    let config = written("estimate-json.json", CONFIG);
    let arguments = ["estimate", &config, "--length", "64", "--json", "--fit", "8GiB", "--savings"];
    let json = json(&arguments);
    assert_eq!(json["estimate"]["parameters"], 53_561_088);
    assert_eq!(json["step"]["batch"], 1);
    assert_eq!(json["fit"]["length"], 1024);
    assert!(json["fit"]["batch"].as_u64().is_some_and(|batch| batch > 1), "{json}");
    assert_eq!(json["savings"]["peak"], json["estimate"]["peak"]);
    assert_eq!((&json["input"]["tokens"], &json["positions"]), (&64.into(), &Value::Null));
    assert_eq!((&json["dtype_from"], &json["computes_in"]), (&"default".into(), &"f32".into()));
    let fit = |key: &str| json["fit"][key].as_u64();
    let left = fit("memory").zip(fit("context")).map(|(memory, context)| (memory - context) / 100 * 98);
    assert_eq!((&json["fit"]["least"], fit("left")), (&Value::Null, left), "a margin of 2 % is left out");
    // The step in the output can be used as input.
    let step = written("estimate-step.json", json["step"].to_string().as_bytes());
    let again = super::report::json(&["estimate", &config, "--length", "64", "--json", "--step", &step]);
    assert_eq!(again["estimate"], json["estimate"]);
    let in_pool = ["estimate", &config, "--length", "64", "--json", "--allocator", "stream_ordered"];
    assert_eq!(super::report::json(&in_pool)["step"]["allocator"], "stream_ordered");
}

#[test]
fn the_events_are_a_recording() {
    let config = written("estimate-record.json", CONFIG);
    let recording = file("estimate.capture");
    let recording = recording.to_str().expect("the name is text");
    let arguments = ["estimate", &config, "--length", "64", "--json", "--record", recording];
    let [json, report] = [&arguments[..], &["report", recording, "--json"]].map(json);
    let peak = json["estimate"]["peak"].as_u64().expect("a number");
    assert!(report.to_string().contains(&format!(":{peak},")), "{peak} is not in {report}");
    assert_eq!(ran(&["diff", recording, recording, "--fail-on-increase", "0%"]).code, Some(0));
}

/// Values that a file of weights does not contain are not estimated. They are unknown, and the exit code is 2.
#[test]
fn weights_alone_have_no_estimate() {
    let weights = written("estimate.safetensors", &safetensors("F32"));
    let Ran { code, stdout, stderr } = ran(&["estimate", &weights]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stdout.contains("activations, gradients, caches and workspaces: unknown."), "{stdout}");
    assert!(stderr.contains("` cannot be estimated: ") && stderr.lines().count() == 1, "{stderr}");
    let Ran { stdout, .. } = ran(&["estimate", &weights, "--json"]);
    let json: Value = serde_json::from_str(&stdout).expect("it is JSON");
    assert_eq!((&json["weights"]["bytes"], &json["estimate"]), (&32.into(), &Value::Null));
}

/// An architecture that is not known has its weights, and the peaks of known decoders with its sizes.
#[test]
fn an_unknown_decoder_has_a_range() {
    let config = br#"{"architectures": ["NewForCausalLM"], "model_type": "new", "hidden_size": 1024, "intermediate_size": 2816,
        "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 8, "vocab_size": 32000, "torch_dtype": "bfloat16"}"#;
    let file = written("estimate-new.json", config);
    let Ran { code, stdout, stderr } = ran(&["estimate", &file, "--length", "2048"]);
    assert_eq!(code, Some(2), "{stderr}");
    let line =
        stdout.lines().find(|line| line.starts_with("a known decoder with these sizes has a peak of ")).expect(&stdout);
    assert!(line.ends_with(": inference, 1 input of 2048 tokens"), "{line}");
    let Ran { stdout, .. } = ran(&["estimate", &file, "--length", "2048", "--json"]);
    let json: Value = serde_json::from_str(&stdout).expect("it is JSON");
    let [low, high] = [0, 1].map(|at| json["range"][at].as_u64().expect("a number"));
    let weights = json["weights"]["bytes"].as_u64().expect("a number");
    assert!(weights < low && low <= high && high < 3 * weights, "{json}");
    let peaks = [low, high].map(|bytes| Bytes::new(bytes).to_string());
    assert!(peaks.iter().all(|peak| line.contains(&**peak)), "{peaks:?} {line}");
    // Other sizes change it.
    let longer = ran(&["estimate", &file, "--length", "8192", "--json"]).stdout;
    let longer: Value = serde_json::from_str(&longer).expect("it is JSON");
    assert!(longer["range"][1].as_u64() > Some(high), "{longer}");
}

#[test]
fn what_is_wrong_is_one_line() {
    let good = written("estimate-good.json", CONFIG);
    let unknown = written("estimate-unknown.json", br#"{"architectures": ["NewLM"]}"#);
    let cases: [&[&str]; 13] = [
        &[&unknown],
        &["no-such-file.json"],
        &[&good, "--length", "2000"],
        &[&good, "--train", "magic"],
        &[&good, "--checkpointing"],
        &[&good, "--fit", "much"],
        &[&good, "--fit", "80"],
        &[&good, "--record", &good],
        &[&good, "--context", "1GiB"],
        &[&good, "--dtype", "float33"],
        &[&good, "--dtype", "q4_0", "--train", "adam"],
        &[&good, "--step", "/dev/zero"],
        &[&good, "--record", "/dev/null"],
    ];
    for arguments in cases {
        let Ran { code, stdout, stderr } = ran(&[&["estimate"], arguments].concat());
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{arguments:?}: {stderr}");
        assert!(!stderr.is_empty() && !stderr.contains("panicked"), "{arguments:?}: {stderr}");
    }
    assert_eq!(fs::read(&good).expect("it is still there"), CONFIG, "--record replaced its input");
    let Ran { stderr, .. } = ran(&["estimate", &unknown]);
    assert!(stderr.contains("the architecture `NewLM` is not supported; supported are Llama"), "{stderr}");
    let Ran { stderr, .. } = ran(&["estimate", &good, "--dtype", "float33"]);
    assert!(stderr.contains("`float33` is not a type of elements; there are f64, f32, f16, bf16, f8, "), "{stderr}");
    let Ran { stderr, .. } = ran(&["estimate", &good, "--train", "magic"]);
    assert!(stderr.contains("`adam`, `adamw`, "), "{stderr}");
    let Ran { stderr, .. } = ran(&["estimate", &good, "--step", "/dev/zero"]);
    assert_eq!(stderr, "gpumem: `/dev/zero` is not a step: it is not a regular file\n");
}

/// Only recordings are replaced.
#[test]
fn a_file_that_is_no_recording_is_kept() {
    let config = written("estimate-keep.json", CONFIG);
    let notes = written("estimate-keep.txt", b"notes");
    let record = |to: &str| ran(&["estimate", &config, "--length", "8", "--record", to]);
    for file in [&config, &notes] {
        let before = fs::read(file).expect("it was written");
        let Ran { code, stdout, stderr } = record(file);
        let why = format!("`{file}`: it exists and is not a recording; use another --record\n");
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{stderr}");
        assert!(stderr.ends_with(&why), "{stderr}");
        assert_eq!(fs::read(file).expect("it is still there"), before);
    }
    let recording = file("estimate-keep.capture");
    let recording = recording.to_str().expect("the name is text");
    for _ in 0..2 {
        assert_eq!(record(recording).code, Some(0), "a recording is replaced");
    }
}

/// A value that neither the file nor an option gives is named, with its default and how to set it.
#[test]
fn what_is_assumed_is_said() {
    let llama = |more: &str| format!(r#"{{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1{more}}}"#);
    let sizes = r#", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 100"#;
    let clip =
        r#"{"model_type": "clip", "projection_dim": 8, "text_config": {"hidden_size": 64, "num_hidden_layers": 1}}"#;
    let lines = |config: &str, more: &[&str]| {
        let file = written("estimate-assumed.json", config.as_bytes());
        let text = printed(&[&["estimate", &file], more].concat());
        let lines: Vec<_> = text.lines().filter(|line| line.contains("assumed")).map(str::to_owned).collect();
        let json = json(&[&["estimate", &file, "--json"], more].concat());
        (lines, json["assumed"].clone())
    };
    let (said, assumed) = lines(&llama(r#", "max_position_embeddings": 2048"#), &[]);
    let expected = [
        "--length was not given: 512 tokens are assumed (the model was made for up to 2048)",
        "not in the file, so the defaults of the Python class are assumed: hidden_size = 4096, intermediate_size = 11008, \
         num_attention_heads = 32, vocab_size = 32000; set them in the file",
    ];
    assert_eq!(said, expected);
    let expected = serde_json::json!({
        "hidden_size": 4096, "intermediate_size": 11008, "length": 512, "num_attention_heads": 32, "vocab_size": 32000,
    });
    assert_eq!(assumed, expected);
    let (said, _) = lines(&llama(sizes), &[]);
    assert_eq!(said, ["--length was not given: 512 tokens are assumed"]);
    let (said, assumed) = lines(&llama(sizes), &["--length", "512"]);
    assert_eq!((said.as_slice(), assumed), (&[][..], serde_json::json!({})));
    let (said, assumed) = lines(clip, &["--length", "77"]);
    assert_eq!(
        (assumed["text_config.intermediate_size"].as_u64(), assumed["vision_config.hidden_size"].as_u64()),
        (Some(2048), Some(768))
    );
    assert!(said[0].contains("text_config.intermediate_size = 2048, ") && said.len() == 1, "{said:?}");
    // A model that is described by its layers also describes its input.
    let described = r#"{"name": "small", "input": {"tokens": 512}, "loss": "next_token", "layers": [
        {"name": "embedding", "type": "embedding", "rows": 100, "size": 8},
        {"name": "head", "type": "linear", "inputs": 8, "outputs": 100}]}"#;
    assert_eq!(lines(described, &[]).0, Vec::<String>::new());
}

/// If nothing fits, a script sees it from the exit code, and stderr gives the reason to the user.
#[test]
fn nothing_that_fits_is_exit_code_1() {
    let config = written("estimate-nothing.json", CONFIG);
    for (memory, left) in [("1MiB", "0 B"), ("1GiB", "0 B"), ("1100MiB", "74.48 MiB")] {
        let arguments = ["estimate", &config, "--length", "64", "--context", "1GiB", "--fit", memory];
        let Ran { code, stdout, stderr } = ran(&arguments);
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.starts_with("gpumem: nothing fits: one needs 2"), "{stderr}");
        assert!(stderr.contains(&format!(", {left} are left after the CUDA context")), "{stderr}");
        assert!(stdout.contains("\n  not even 1 input of 64 tokens fits: it needs 2"), "{stdout}");
        assert!(stdout.contains("\n  not even inputs of one token fit in a batch of 1\n"), "{stdout}");
        let json: Value = serde_json::from_str(&ran(&[&arguments[..], &["--json"]].concat()).stdout).expect("JSON");
        assert_eq!((&json["fit"]["batch"], &json["fit"]["least"]), (&0.into(), &json["estimate"]["reserved"]));
    }
    // The allocator needs more than the tensors have.
    let gpt2 = written("estimate-nothing-gpt2.json", br#"{"model_type": "gpt2"}"#);
    let stderr = ran(&["estimate", &gpt2, "--train", "adam", "--length", "1024", "--fit", "4GiB"]).stderr;
    assert!(stderr.contains(": one needs 3.25 GiB, and of 4 GiB, 3.18 GiB are left "), "{stderr}");
    // Shorter inputs would fit.
    let Ran { code, stderr, .. } = ran(&["estimate", &config, "--length", "1024", "--context", "0", "--fit", "300MiB"]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.starts_with("gpumem: no input of this length fits: one needs "), "{stderr}");
}

/// The assumed length is not longer than the positions that the model has.
#[test]
fn the_default_length_fits_the_positions_of_the_model() {
    for (name, config, length) in [
        ("gpt2", r#""n_layer": 2, "n_positions": 128"#, 128),
        ("gpt2", r#""n_layer": 2"#, 512),
        ("llama", r#""num_hidden_layers": 2, "max_position_embeddings": 64"#, 64),
        ("whisper", r#""encoder_layers": 2, "decoder_layers": 2, "max_target_positions": 100"#, 100),
        ("whisper", r#""encoder_layers": 2, "decoder_layers": 2"#, 448),
    ] {
        let file = written("estimate-lengths.json", format!("{{\"model_type\": \"{name}\", {config}}}").as_bytes());
        let text = printed(&["estimate", &file]);
        assert!(text.contains(&format!("--length was not given: {length} tokens are assumed")), "{text}");
    }
    let clip = written("estimate-clip.json", br#"{"model_type": "clip"}"#);
    assert_eq!(ran(&["estimate", &clip]).code, Some(0));
    // A length that was given is not changed.
    let file = written("estimate-lengths.json", br#"{"model_type": "gpt2", "n_layer": 2, "n_positions": 128}"#);
    assert_eq!(ran(&["estimate", &file, "--length", "512"]).code, Some(2));
}

#[test]
fn types_say_where_they_come_from() {
    let none = written("estimate-none.json", CONFIG);
    let half = written("estimate-half.json", br#"{"model_type": "gpt2", "n_layer": 2, "torch_dtype": "float16"}"#);
    let seven = written("estimate-seven.json", br#"{"model_type": "gpt2", "n_layer": 2, "torch_dtype": "float7"}"#);
    let line = |file: &str, more: &[&str]| {
        let text = printed(&[&["estimate", file, "--length", "64"], more].concat());
        text.lines().nth(2).unwrap_or_default().to_owned()
    };
    for (file, dtype, expected) in [
        (&none, "", "parameters in f32, because the file names none"),
        (&half, "", "parameters in f16, as the file says"),
        (&seven, "", "parameters in f32, because the file says `float7`, which is not known"),
        (
            &seven,
            "int8",
            "weights of linear layers in 8 bits, all else in bf16 (the file says `float7`, which is not known)",
        ),
        (&half, "BFloat16", "parameters in bf16"),
        (&none, "torch.float16", "parameters in f16"),
        (&none, "half", "parameters in f16"),
        (&none, "fp32", "parameters in f32"),
        (&none, "int8", "weights of linear layers in 8 bits, all else in bf16 (the file names no type for it)"),
        (&half, "q4_0", "weights in q4_0, all else in f16 (the type of the file)"),
    ] {
        let dtype: &[&str] = if dtype.is_empty() { &[] } else { &["--dtype", dtype] };
        assert_eq!(line(file, dtype), expected, "{dtype:?}");
    }
    let peak = |optimizer: &str| printed(&["estimate", &none, "--length", "64", "--train", optimizer]);
    assert_eq!(peak("AdamW"), peak("adam"));
}

/// A model with more tokens than it was made for still runs, and the report mentions it.
#[test]
fn lengths_beyond_the_positions_are_said() {
    let llama = br#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 32,
        "num_attention_heads": 4, "vocab_size": 32000, "max_position_embeddings": 100, "torch_dtype": "bfloat16"}"#;
    let llama = written("estimate-positions.json", llama);
    let said = "the model was made for 100 positions, and the inputs have 101 tokens";
    let text = printed(&["estimate", &llama, "--length", "101"]);
    assert!(text.contains(&format!("\n{said}\n")), "{text}");
    assert!(!printed(&["estimate", &llama, "--length", "100"]).contains("positions"));
    // The 32 blocks of the model are equal.
    assert!(text.contains("\n   model.layers.0 … 31 (32×) "), "{text}");
    assert!(text.contains("\nA row with × is the sum of that many equal layers.\n"), "{text}");
    let json = json(&["estimate", &llama, "--length", "101", "--fit", "8GiB", "--json"]);
    assert_eq!((&json["notes"], &json["positions"]), (&Value::from(vec![said]), &100.into()));
    assert_eq!(json["fit"]["length_is_all_positions"], false);
    let fit = printed(&["estimate", &llama, "--length", "100", "--fit", "8GiB"]);
    assert!(fit.contains(" tokens (it was made for 100 positions)\n"), "{fit}");
}

//! `gpumem estimate`.

use std::fs;

use serde_json::Value;

use crate::{Ran, file, ran, report::printed};

/// A file for one test.
fn written(name: &str, bytes: &[u8]) -> String {
    let path = file(name);
    fs::write(&path, bytes).expect("the folder for tests can be written");
    path.to_str().expect("the name is text").to_owned()
}

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
    let text = printed(&[&arguments[..], &["--savings", "--fit", "8GiB", "--context", "1GiB"]].concat());
    assert!(text.contains(": training, 4 inputs of 64 tokens, parameters in f32\nthe estimated peak is "), "{text}");
    for part in
        ["\n at the peak, by class ", "\n one change ", "\n checkpointing of each block ", " 53,561,088 parameters"]
    {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let fit = "\nwith 8 GiB: the CUDA context and libraries have 1 GiB, and 2 % stay free\n  the largest batch is ";
    assert!(text.contains(fit), "{text}");
    assert!(text.ends_with(" of a batch of 4 have 1024 tokens (all of its positions)\n"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn json_has_the_same_figures() {
    let config = written("estimate-json.json", CONFIG);
    let arguments = ["estimate", &config, "--length", "64", "--json", "--fit", "8GiB", "--savings"];
    let json: Value = serde_json::from_str(&printed(&arguments)).expect("it is JSON");
    assert_eq!(json["estimate"]["parameters"], 53_561_088);
    assert_eq!(json["step"]["batch"], 1);
    assert_eq!(json["fit"]["length"], 1024);
    assert!(json["fit"]["batch"].as_u64().is_some_and(|batch| batch > 1), "{json}");
    assert_eq!(json["savings"]["peak"], json["estimate"]["peak"]);
    // The step in the output can be given again.
    let step = written("estimate-step.json", json["step"].to_string().as_bytes());
    let again = printed(&["estimate", &config, "--length", "64", "--json", "--step", &step]);
    let again: Value = serde_json::from_str(&again).expect("it is JSON");
    assert_eq!(again["estimate"], json["estimate"]);
}

#[test]
fn the_events_are_a_recording() {
    let config = written("estimate-record.json", CONFIG);
    let capture = file("estimate.capture");
    let capture = capture.to_str().expect("the name is text");
    let arguments = ["estimate", &config, "--length", "64", "--json", "--record", capture];
    let json: Value = serde_json::from_str(&printed(&arguments)).expect("it is JSON");
    let report: Value = serde_json::from_str(&printed(&["report", capture, "--json"])).expect("it is JSON");
    let peak = json["estimate"]["peak"].as_u64().expect("a number");
    assert!(report.to_string().contains(&format!(":{peak},")), "{peak} is not in {report}");
    assert_eq!(ran(&["diff", capture, capture, "--fail-on-increase", "0%"]).code, Some(0));
}

/// What a file of weights does not say is not estimated: it is unknown, and the exit code says so.
#[test]
fn weights_alone_have_no_estimate() {
    let weights = written("estimate.safetensors", &safetensors("F32"));
    let Ran { code, stdout, stderr } = ran(&["estimate", &weights]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stdout.contains("activations, gradients, caches and workspaces: unknown."), "{stdout}");
    assert!(stderr.contains("` has no estimate: ") && stderr.lines().count() == 1, "{stderr}");
    let Ran { stdout, .. } = ran(&["estimate", &weights, "--json"]);
    let json: Value = serde_json::from_str(&stdout).expect("it is JSON");
    assert_eq!((&json["weights"]["bytes"], &json["estimate"]), (&32.into(), &Value::Null));
}

#[test]
fn what_is_wrong_is_one_line() {
    let good = written("estimate-good.json", CONFIG);
    let unknown = written("estimate-unknown.json", br#"{"architectures": ["NewLM"]}"#);
    let torn = written("estimate-torn.safetensors", &safetensors("F32")[..20]);
    let nested = written("estimate-nested.json", "[".repeat(1_000_000).as_bytes());
    let cases: [&[&str]; 13] = [
        &[&unknown],
        &[&torn],
        &[&nested],
        &["no-such-file.json"],
        &[&good, "--length", "2000"],
        &[&good, "--train", "magic"],
        &[&good, "--checkpointing"],
        &[&good, "--fit", "1MiB"],
        &[&good, "--fit", "much"],
        &[&good, "--fit", "80"],
        &[&good, "--record", &good],
        &[&good, "--context", "1GiB"],
        &[&good, "--dtype", "float32"],
    ];
    for arguments in cases {
        let Ran { code, stdout, stderr } = ran(&[&["estimate"], arguments].concat());
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{arguments:?}: {stderr}");
        assert!(!stderr.is_empty() && !stderr.contains("panicked"), "{arguments:?}: {stderr}");
    }
    assert_eq!(fs::read(&good).expect("it is still there"), CONFIG, "--record replaced its input");
    let Ran { stderr, .. } = ran(&["estimate", &unknown]);
    assert!(stderr.ends_with("the architecture `NewLM` is not supported\n"), "{stderr}");
}

#[test]
fn gb_are_gib_and_the_stored_type_counts() {
    let config = br#"{"model_type": "gpt2", "n_layer": 2, "torch_dtype": "bfloat16"}"#;
    let config = written("estimate-units.json", config);
    let fit = |memory: &str| -> Value {
        let text = printed(&["estimate", &config, "--length", "64", "--json", "--context", "0", "--fit", memory]);
        serde_json::from_str(&text).expect("it is JSON")
    };
    assert_eq!(fit("1GB")["fit"]["memory"], 1_u64 << 30);
    assert_eq!(fit("1GiB")["fit"]["memory"], 1_u64 << 30);
    assert_eq!(fit("1GiB")["step"]["parameters"], "bf16");
    let little = printed(&["estimate", &config, "--length", "64", "--context", "0", "--fit", "1MB"]);
    assert!(little.contains("\n  not even a batch of one input fits\n"), "{little}");
    let cubecl = printed(&["estimate", &config, "--length", "64", "--json", "--allocator", "cubecl=16GiB"]);
    let cubecl: Value = serde_json::from_str(&cubecl).expect("it is JSON");
    assert_eq!(cubecl["step"]["allocator"]["cubecl"]["card"], 1_u64 << 34);
}

//! Tests that `gpumem estimate` ends with 0 or 2 if a file is damaged, and gives the reason in lines that start with `gpumem: `.
//! The mutations are the same in each run. The tests of `gpumem-recording`, and `fuzz/`, damage recordings.

use std::{
    fs,
    io::{Read, Write},
};

use fastrand::Rng;
use flate2::{Compression, Crc, read::DeflateDecoder, write::DeflateEncoder};

use crate::{file, limits::Limits, linked, ran};

/// Changes, removes, adds or repeats a few bytes.
fn damage(random: &mut Rng, bytes: &mut Vec<u8>) {
    for _ in 0..=random.usize(..3) {
        let at = random.usize(..bytes.len());
        let rest = bytes.len() - at;
        match random.u32(..7) {
            0 => bytes[at] ^= 1 << random.u32(..8),
            1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.usize(..5)],
            2 => bytes[at..][..rest.min(8)].fill(0xff),
            3 => drop(bytes.drain(at..at + rest.min(1 + random.usize(..100)))),
            4 => drop(bytes.splice(at..at, [0xff, 0xff, 0xff, 0xff, 0x0f])),
            5 => {
                let again = bytes[at..][..rest.min(1 + random.usize(..64))].to_vec();
                drop(bytes.splice(at..at, again));
            }
            _ => bytes.truncate(at + 1),
        }
        if bytes.is_empty() {
            bytes.push(0);
        }
    }
}

pub(crate) const HEADER: usize = 16;

/// Returns the items of each record of a recording.
pub(crate) fn records(file: &[u8]) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    let mut rest = &file[HEADER..];
    while let Some((header, stored)) = rest.split_at_checked(HEADER) {
        let length = u32::from_le_bytes(header[4..8].try_into().expect("it has 4 bytes")) as usize;
        let (stored, after) = stored.split_at(length);
        let mut items = Vec::new();
        if header[1] == 0 {
            items.extend_from_slice(stored);
        } else {
            DeflateDecoder::new(stored).read_to_end(&mut items).expect("the record can be inflated");
        }
        records.push(items);
        rest = after;
    }
    records
}

/// Makes a recording of these records, with correct checksums. The records are as short as a reader allows.
pub(crate) fn recording(start: &[u8], records: &[Vec<u8>]) -> Vec<u8> {
    let mut file = start.to_vec();
    for items in records {
        let stored = compressed(items);
        let is_shorter = stored.len() < items.len();
        file.extend(record(is_shorter.into(), items.len(), if is_shorter { &stored } else { items }));
    }
    file
}

/// Makes a record whose bytes are stored with this method.
fn record(method: u8, plain: usize, stored: &[u8]) -> Vec<u8> {
    let [plain, length] = [plain, stored.len()].map(|length| u32::try_from(length).expect("it is small").to_le_bytes());
    let header = [&[1, method, 0, 0][..], &length, &plain].concat();
    let mut sum = Crc::new();
    sum.update(&header);
    sum.update(stored);
    [&*header, &sum.sum().to_le_bytes(), stored].concat()
}

/// Compresses items as much as a reader allows: a byte may expand to 64. Empty blocks lengthen data that would expand to more.
fn compressed(items: &[u8]) -> Vec<u8> {
    let mut stored = DeflateEncoder::new(Vec::new(), Compression::best());
    stored.write_all(items).expect("memory takes all");
    let stored = stored.finish().expect("memory takes all");
    let least = items.len().saturating_sub(4096).div_ceil(64);
    let empty = [0, 0, 0, 0xff, 0xff].repeat(least.saturating_sub(stored.len()).div_ceil(5));
    [empty, stored].concat()
}

#[test]
fn an_error_names_the_file_once() {
    let ran = ran(&["estimate", "no-such.json"]);
    assert_eq!(ran.stderr, "gpumem: `no-such.json` cannot be used: No such file or directory (os error 2)\n");
}

#[test]
fn damaged_models() {
    let config = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 172,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": false}"#;
    let header = r#"{"a.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}"#;
    let safetensors = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 64]].concat();
    let gguf = fs::read(linked("llama-3.2-1b.gguf")).expect("the file is there");
    fs::create_dir_all(file("damaged")).expect("the folder can be made");
    let mut random = Rng::with_seed(2);
    let mut rejected = 0;
    for (name, whole, from) in [
        ("damaged/config.json", config.as_bytes(), 0),
        ("damaged/model.safetensors", &*safetensors, 0),
        // The names of tokens take most of the file.
        ("damaged/model.gguf", &*gguf, gguf.len().saturating_sub(4000)),
    ] {
        let path = file(name);
        let question = ["estimate", path.to_str().expect("the name is text"), "--train", "adam"];
        for round in 0..25 {
            let mut bytes = whole.to_vec();
            let mut part = bytes.split_off(if round % 2 == 0 { from } else { 0 });
            damage(&mut random, &mut part);
            bytes.append(&mut part);
            fs::write(&path, bytes).expect("the file can be written");
            let spent = Limits::OF_A_RECORDING.run(&question).unwrap_or_else(|why| panic!("{why}"));
            rejected += usize::from(spent.is_rejected);
        }
    }
    assert!(rejected > 25, "{rejected}: most damage is noticed");
}

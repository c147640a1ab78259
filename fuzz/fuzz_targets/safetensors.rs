//! This target reads safetensors files, and adds up their tensors.

#![no_main]

use std::{env, fs, process};

use gpumem_estimate::Tensors;
use libfuzzer_sys::fuzz_target;

mod seeds;

fuzz_target!(init: write_seeds(), |data: &[u8]| {
    let path = env::temp_dir().join(format!("gpumem-fuzz-{}.safetensors", process::id()));
    fs::write(&path, data).expect("the file can be written");
    let read = Tensors::from_safetensors(&path);
    fs::remove_file(&path).expect("the file is there");
    let Ok(tensors) = read else { return };
    drop((tensors.sum(), tensors.by_dtype(), tensors.by_module(2)));
});

fn write_seeds() {
    let headers = [
        r#"{}"#,
        r#"{"a":{"dtype":"BF16","shape":[4,2],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}"#,
        r#"{"__metadata__":{"format":"pt"},"a.b":{"dtype":"F8_E4M3","shape":[],"data_offsets":[0,1]},"a.c":{"dtype":"F4","shape":[2,3],"data_offsets":[1,4]},"d":{"dtype":"I64","shape":[0,7],"data_offsets":[4,4]}}"#,
    ];
    let file = |(header, data): (&str, usize)| {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        file.resize(file.len() + data, 0);
        file
    };
    seeds::write("safetensors", headers.into_iter().zip([0, 32, 4]).map(file));
}

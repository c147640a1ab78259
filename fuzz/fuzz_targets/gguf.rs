//! This target reads the header of a GGUF file, and estimates the model that it describes.

#![no_main]

use std::fs;

use gpumem_estimate::Gguf;
use libfuzzer_sys::fuzz_target;

mod seeds;

fuzz_target!(init: write_seeds(), |data: &[u8]| {
    let Ok(file) = Gguf::from_header(data) else { return };
    drop((file.tensors().by_dtype(), file.tensors().by_module(2), file.model(16)));
});

fn write_seeds() {
    let folder = fs::read_dir(seeds::file("crates/estimate/tests/gguf")).expect("the folder is there");
    let files = folder.flatten().filter(|file| file.path().extension().is_some_and(|extension| extension == "gguf"));
    seeds::write("gguf", files.map(|file| fs::read(file.path()).expect("the file can be read")));
}

//! Writes a recording of a million events, to measure how long reports take: `cargo run --example million -- FILE [EVENTS]`. With
//! `--ranks NUMBER`, it writes the recordings of this number of ranks into a folder: `cargo run --example million -- FOLDER
//! --ranks 1000`.

#[path = "../tests/command/recording_builder.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod recording_builder;

use std::{fs, path::Path};

use recording_builder::RecordingBuilder;

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let number = |text: &String| text.parse().expect("this argument is a number");
    let write = |path: &Path, made: RecordingBuilder| fs::write(path, made.file()).expect("the file can be written");
    match arguments.as_slice() {
        [folder, option, ranks] if option == "--ranks" => {
            fs::create_dir_all(folder).expect("the folder can be created");
            for rank in 0..number(ranks) {
                let name = format!("train.rank{rank}.gpu{}.pid{}.capture", rank % 8, 4_711 + rank);
                write(&Path::new(folder).join(name), RecordingBuilder::of_rank(rank));
            }
        }
        [file, events @ ..] => {
            let events = events.first().map_or(1_000_000, number);
            write(Path::new(file), RecordingBuilder::new("train").varied(events));
        }
        [] => panic!("the first argument is the file"),
    }
}

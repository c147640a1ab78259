//! Writes a recording of a million events, to measure how long reports take: `cargo run --example million -- FILE [STEPS]`.

#[path = "../tests/command/made.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod made;

use made::Made;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().expect("the argument is the file");
    // 100 layers: 400 events a step.
    let steps = arguments.next().map_or(2_500, |steps| steps.parse().expect("the second argument is a number"));
    let recording = Made::new("train").training(steps, 100, 3 << 20).file();
    std::fs::write(file, recording).expect("the file can be written");
}

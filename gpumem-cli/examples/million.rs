//! Writes a recording of a million events, to measure how long reports take: `cargo run --example million -- FILE [EVENTS]`.

#[path = "../tests/command/made.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod made;

use made::Made;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().expect("the argument is the file");
    let events = arguments.next().map_or(1_000_000, |events| events.parse().expect("the second argument is a number"));
    std::fs::write(file, Made::new("train").varied(events).file()).expect("the file can be written");
}

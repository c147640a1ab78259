//! Uses a library that has guards and attributes.

fn main() {
    let input: Vec<u64> = (0..16).collect();
    let mut trainer = library::Trainer::new();
    trainer.train(&input);
    library::poll_once(library::step_later(input));
}

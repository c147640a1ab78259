//! Texts that tests compare.

/// Replaces the line numbers of places: `At src/main.rs:12` becomes `At src/main.rs:NN`.
///
/// # Panics
/// When a line is wider than 80 columns.
pub fn without_line_numbers(text: &str) -> String {
    let mut lines = text.split_inclusive('\n').map(|line| {
        let Some((file, rest)) = line.strip_prefix("At ").and_then(|line| line.split_once(".rs:")) else {
            return line.to_owned();
        };
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        format!("At {file}.rs:NN{}", &rest[digits..])
    });
    let text: String = lines.by_ref().collect();
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    text
}

/// The text at the right margin of a page of 80 columns.
pub fn at_the_right_margin(text: &str) -> String {
    format!("{text:>80}")
}

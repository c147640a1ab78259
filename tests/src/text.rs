//! Texts that tests compare.

/// Replaces the time and the line number at the start of lines: `13:59:03Z src/main.rs:12 …` becomes `TIME src/main.rs:NN …`.
///
/// # Panics
/// Panics if a line is wider than 80 columns.
pub fn without_line_numbers(text: &str) -> String {
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    text.split_inclusive('\n').map(line).collect()
}

fn line(line: &str) -> String {
    let is_time = |time: &str| {
        time.len() == "13:59:03Z".len() && time.ends_with('Z') && time.bytes().filter(|byte| *byte == b':').count() == 2
    };
    let parts = line.split_once(' ').filter(|(time, _)| is_time(time)).and_then(|(_, rest)| rest.split_once(".rs:"));
    let Some((file, rest)) = parts else { return line.to_owned() };
    format!("TIME {file}.rs:NN{}", rest.trim_start_matches(|c: char| c.is_ascii_digit()))
}

//! The writers of reports, one file for each topic. They only write: all numbers are derived earlier. The building blocks of
//! tables are public, because the command `gpumem` uses them as well.

mod amounts;
mod breakdown;
mod holders;
#[cfg(test)]
mod hostile;
mod json;
mod json_escapes;
mod marks;
mod memory_stats;
mod output;
mod paint;
mod part_table;
mod pools;
#[cfg(test)]
mod samples;
mod sink;
mod stats;
mod summary;
mod table;
mod text;
mod time;
mod tracked;
mod tree;

pub use self::{
    amounts::Amounts,
    json::json_line,
    json_escapes::JsonEscapes,
    marks::or_unknown,
    paint::{InPaint, Paint, Painted, Role, Show},
    part_table::{part_table, part_table_in},
    pools::pool_in_words,
    sink::{ParseSinkError, Sink},
    table::{Cell, Fit, Table, shortened, shortened_command},
    text::grouped,
    tree::{Leaf, Row, Tree},
};
use crate::report::Output;

/// The form in which output is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Text for people.
    Text,
    /// A JSON object on each line.
    Json,
}

impl Form {
    /// Returns the output as a single string that ends in a line break, so that outputs of several threads and processes do
    /// not mix.
    pub fn write(self, output: &Output, paint: Paint) -> String {
        let mut text = match self {
            Self::Text => output::text(output, paint),
            Self::Json => json_line(output),
        };
        text.push('\n');
        text
    }
}

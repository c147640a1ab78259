//! Writes tables that fit into the columns of a terminal.

use std::{
    borrow::Cow,
    fmt::{self, Write},
};

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::{
    amounts::Amounts,
    paint::{Paint, Role, Show},
};
use crate::model::one_line;

/// The width of a bar.
const BAR: usize = 8;
/// The number of columns by which a row is indented under its outer row.
const INDENT: usize = 2;
/// The smallest width of a truncated name.
const LEAST: usize = 12;
/// Bars are left out before a name is truncated to less than this.
const ENOUGH: usize = 20;

/// The alignment of a column, and how text that is too long is truncated.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// Text is aligned to the right.
    Right,
    /// Text is aligned to the left.
    Left,
    /// Text is aligned to the left. Text that is too long is truncated at its start.
    LeftCutFront,
    /// Text is aligned to the left. Text that is too long is truncated at its end.
    LeftCutEnd,
    /// A command line is aligned to the left; see [`shortened_command`].
    LeftCutCommand,
}

/// A heading and rows. One column may be truncated: it gets the width that the others leave.
#[derive(Default)]
pub struct Table {
    columns: Vec<Column>,
    lines: Vec<TableLine>,
}

struct Column {
    name: String,
    /// The unit of a column of amounts, unless the name contains it.
    unit: &'static str,
    fit: Fit,
}

enum TableLine {
    Row(Vec<Cell>),
    /// Text across all columns, and its nesting depth.
    Note(usize, String),
}

/// A cell of a table.
#[derive(Clone, Default)]
pub struct Cell {
    /// The nesting depth.
    depth: usize,
    text: String,
    role: Role,
}

impl Cell {
    /// Creates a cell that is indented by its depth.
    pub fn nested(depth: usize, text: &str) -> Self {
        Self { depth, ..Self::from(text) }
    }

    /// Creates a bar for the share of `part` in `whole`, in eighths of a column.
    pub fn bar(part: i64, whole: i64) -> Self {
        const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
        let (part, whole) = (i128::from(part.max(0)), i128::from(whole.max(1)));
        let eighths = usize::try_from((part * 8 * BAR as i128 / whole).min(8 * BAR as i128)).unwrap_or(0);
        let eighths = if part > 0 { eighths.max(1) } else { eighths };
        let text = "█".repeat(eighths / 8) + EIGHTHS[eighths % 8];
        Self { depth: 0, text, role: Role::Bar }
    }

    /// Returns the cell with the colour of this role.
    #[must_use]
    pub fn role(self, role: Role) -> Self {
        Self { role, ..self }
    }

    fn width(&self) -> usize {
        INDENT * self.depth + self.text.width()
    }

    /// Returns the smallest width at which the text can be shown.
    fn least(&self) -> usize {
        self.text.width().min(LEAST)
    }
}

impl<T: AsRef<str>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self { depth: 0, text: one_line(text.as_ref()).into_owned(), role: Role::Text }
    }
}

/// Writes the lines, without a line break after the last one.
impl Show for Table {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let layout = self.layout(paint.width());
        let heading = |text: fn(&Column) -> &str, role: Role| {
            let cells: Vec<_> = self.columns.iter().map(|column| Cell::from(text(column)).role(role)).collect();
            self.line(&cells, &layout, paint)
        };
        writeln!(f, "{}", heading(|column| &column.name, Role::Heading))?;
        if self.columns.iter().any(|column| !column.unit.is_empty()) {
            writeln!(f, "{}", heading(|column| column.unit, Role::Faint))?;
        }
        write!(f, " {}", paint.on(Role::Faint, "─".repeat(layout.width() - 1)))?;
        for line in &self.lines {
            match line {
                TableLine::Row(cells) => write!(f, "\n{}", self.line(cells, &layout, paint))?,
                TableLine::Note(depth, text) => {
                    let indent = 1 + layout.indent * depth;
                    let text = shortened(text, paint.width().saturating_sub(indent));
                    write!(f, "\n{:indent$}{}", "", paint.on(Role::Faint, text))?;
                }
            }
        }
        Ok(())
    }
}

impl Table {
    /// Creates a table without columns.
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the fit of the first column.
    #[must_use]
    pub fn first_column(mut self, fit: Fit) -> Self {
        self.columns.iter_mut().take(1).for_each(|column| column.fit = fit);
        self
    }

    /// Adds a column.
    #[must_use]
    pub fn column(mut self, name: &str, fit: Fit) -> Self {
        self.columns.push(Column { name: name.to_owned(), unit: "", fit });
        self
    }

    /// Adds a column of amounts. Its unit is below its name. If there is no name, the unit is the heading.
    #[must_use]
    pub fn amounts(mut self, name: &str, amounts: Amounts) -> Self {
        let (name, unit) = if name.is_empty() { (amounts.unit, "") } else { (name, amounts.unit) };
        self.columns.push(Column { name: name.to_owned(), unit, fit: Fit::Right });
        self
    }

    /// Adds a row, with a cell for each column.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.lines.push(TableLine::Row(cells.into_iter().collect()));
    }

    /// Adds a line below the last row, indented like rows of this depth.
    pub fn note(&mut self, depth: usize, text: &str) {
        self.lines.push(TableLine::Note(depth, text.to_owned()));
    }

    /// Computes the layout. The column that may be truncated gets the width that the others leave. If that is too little, bars are
    /// left out first, and then the gaps between columns shrink.
    fn layout(&self, width: usize) -> Layout {
        let rows =
            || self.lines.iter().filter_map(|line| if let TableLine::Row(cells) = line { Some(cells) } else { None });
        let natural = |(at, Column { name, unit, .. }): (usize, &Column)| {
            let cells = rows().filter_map(|cells| cells.get(at)).map(Cell::width);
            Some(cells.max().unwrap_or(0).max(name.width()).max(unit.width()))
        };
        let widths = self.columns.iter().enumerate().map(natural).collect();
        let mut layout = Layout { widths, gap: 2, indent: INDENT };
        let can_be_cut =
            |column: &Column| matches!(column.fit, Fit::LeftCutFront | Fit::LeftCutEnd | Fit::LeftCutCommand);
        let cut = self.columns.iter().position(can_be_cut);
        let name = cut.and_then(|at| layout.widths[at]).unwrap_or(0);
        // The space left for the name.
        let room = |layout: &Layout| (width + name).saturating_sub(layout.width());
        if room(&layout) < name.min(ENOUGH) {
            for (at, width) in layout.widths.iter_mut().enumerate() {
                let is_bar = rows().filter_map(|cells| cells.get(at)).any(|cell| cell.role == Role::Bar);
                *width = width.filter(|_| !is_bar);
            }
        }
        if room(&layout) < name.min(LEAST) {
            layout.gap = 1;
        }
        if let Some(at) = cut {
            let room = room(&layout).max(LEAST);
            let width = name.min(room);
            layout.widths[at] = Some(width);
            // All rows of a tree have the same indentation, which is reduced if one of them would not fit.
            let fits = |cell: &Cell| layout.indent * cell.depth + cell.least() <= width;
            if !rows().filter_map(|cells| cells.get(at)).all(fits) {
                layout.indent = 1;
            }
        }
        layout
    }

    fn line(&self, cells: &[Cell], layout: &Layout, paint: Paint) -> String {
        let columns = cells.iter().zip(&self.columns).zip(&layout.widths);
        let mut columns: Vec<_> =
            columns.filter_map(|((cell, column), width)| Some((cell, column, (*width)?))).collect();
        let last = columns.iter().rposition(|(cell, ..)| !cell.text.is_empty()).map_or(0, |at| at + 1);
        columns.truncate(last);
        let mut line = String::new();
        for (at, (cell, Column { fit, .. }, width)) in columns.into_iter().enumerate() {
            let Cell { depth, text, role } = cell;
            // Text that is nested too deep for the column is indented only as far as its last name still fits.
            let indent = (layout.indent * depth).min(width.saturating_sub(cell.least()));
            let room = width - indent;
            let text = match fit {
                Fit::LeftCutFront => shortened(text, room),
                Fit::LeftCutEnd => cut(text, room),
                Fit::LeftCutCommand => shortened_command(text, room),
                Fit::Left | Fit::Right => text.clone(),
            };
            let before = if *fit == Fit::Right { room.saturating_sub(text.width()) } else { 0 };
            let after = if at + 1 == last { 0 } else { room.saturating_sub(before + text.width()) };
            let gap = indent + before + if at == 0 { 1 } else { layout.gap };
            let _ = write!(line, "{:gap$}{}{:after$}", "", paint.on(*role, text), "");
        }
        line
    }
}

/// The width of each column (`None` if it is left out), the spaces between two columns, and the indentation for each level of nesting.
struct Layout {
    widths: Vec<Option<usize>>,
    gap: usize,
    indent: usize,
}

impl Layout {
    /// Returns the width of a line, including the space before it.
    fn width(&self) -> usize {
        let shown = self.widths.iter().flatten();
        1 + shown.clone().sum::<usize>() + self.gap * shown.count().saturating_sub(1)
    }
}

/// Truncates a name to this number of columns. Keeps the end of a longer name, because it is the most specific part, in whole path
/// segments. The function of `function (path)` is kept too, if it fits.
pub fn shortened(name: &str, most: usize) -> String {
    let name = one_line(name);
    if name.width() <= most {
        return name.into_owned();
    }
    if let Some((function, place)) = name.strip_suffix(')').and_then(|name| name.split_once(" ("))
        && let Some(room) = most.checked_sub(function.width() + " ()".len()).filter(|room| *room >= LEAST)
    {
        return format!("{function} ({})", shortened(place, room));
    }
    let end = fitting(name.char_indices().rev(), most).last().map_or(name.len(), |(at, _)| at);
    let kept = &name[end..];
    let is_end_of_name = |at: &usize| !kept[..*at].contains(char::is_whitespace) && kept[*at..].width() * 2 > most;
    let start = kept.find('/').filter(is_end_of_name).unwrap_or(0);
    format!("…{}", &kept[start..])
}

/// Truncates a command line to this number of columns. Folders are removed first, from the left, because the interpreter's folder
/// matters least. Then the end is truncated.
pub fn shortened_command(line: &str, most: usize) -> String {
    let line = one_line(line);
    let mut words: Vec<_> = line.split(' ').map(Cow::Borrowed).collect();
    let mut width = line.width();
    for word in &mut words {
        if width <= most {
            break;
        }
        let name =
            word.rsplit_once('/').map(|(_, name)| name).filter(|name| !name.is_empty() && !word.starts_with('-'));
        if let Some(short) = name.map(|name| format!("…/{name}")).filter(|short| short.width() < word.width()) {
            width = width + short.width() - word.width();
            *word = Cow::Owned(short);
        }
    }
    cut(&words.join(" "), most)
}

/// Truncates text to this number of columns. Keeps the start of a longer text.
fn cut(text: &str, most: usize) -> String {
    if text.width() <= most {
        return text.to_owned();
    }
    let end = fitting(text.char_indices(), most).last().map_or(0, |(at, c)| at + c.len_utf8());
    format!("{}…", text[..end].trim_end())
}

/// Returns the characters that fit together with `…`.
fn fitting(chars: impl Iterator<Item = (usize, char)>, most: usize) -> impl Iterator<Item = (usize, char)> {
    let mut room = most.saturating_sub(1);
    chars.take_while(move |(_, c)| {
        let left = room.checked_sub(c.width().unwrap_or(0));
        room = left.unwrap_or_default();
        left.is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::InPaint;

    #[test]
    fn columns_stand_in_80() {
        let mut table = Table::new().column("MiB", Fit::Right).column("what", Fit::LeftCutEnd);
        table.row(["1.000".into(), "short".into()]);
        table.row(["143771".into(), "long ".repeat(30).into()]);
        table.note(1, "below");
        table.row(["-1".into(), "two\nlines".into()]);
        let text = InPaint(&table, Paint::PLAIN).to_string();
        let rule = format!(" {}", "─".repeat(79));
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                "    MiB  what",
                &rule,
                "  1.000  short",
                " 143771  long long long long long long long long long long long long long long…",
                "   below",
                "     -1  two\\nlines",
            ]
        );
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn names_are_nested_and_lose_their_start() {
        let amounts = Amounts::of([1 << 20, 3 << 19]);
        let mut table = Table::new().column("scope", Fit::LeftCutFront).amounts("used", amounts).column("", Fit::Left);
        for (depth, name, bytes) in [(0, "train", 3 << 19), (1, &*"a long name ".repeat(9), 1 << 20)] {
            table.row([Cell::nested(depth, name), amounts.show(bytes).into(), Cell::bar(bytes, 3 << 19)]);
        }
        let text = InPaint(&table, Paint::PLAIN).to_string();
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with(" scope ") && lines[0].ends_with("used"), "{text}");
        assert!(lines[1].trim() == "MiB" && lines[1].len() == lines[0].len(), "{text}");
        assert!(lines[3].ends_with("   1.5  ████████") && lines[3].starts_with(" train "), "{text}");
        assert!(lines[4].starts_with("   …") && lines[4].ends_with("name    1.0  █████▎"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    /// The column of the first letter of each row is the same.
    #[test]
    fn all_rows_of_a_tree_have_one_indentation() {
        let column_starts = |rows: &[(usize, &str)], columns: usize| {
            let mut table = Table::new().column("scope", Fit::LeftCutFront).column("n", Fit::Right);
            for (depth, name) in rows {
                table.row([Cell::nested(*depth, name), "1".into()]);
                table.note(depth + 1, "note");
            }
            let text = InPaint(&table, Paint::PLAIN.in_columns(columns)).to_string();
            let start = |line: &str| line.chars().take_while(|c| *c == ' ').count();
            text.lines().skip(2).map(start).collect::<Vec<_>>()
        };
        // The column is as wide as the longest name.
        assert_eq!(column_starts(&[(0, "whole process"), (1, "train"), (2, "step")], 80), [1, 3, 3, 5, 5, 7]);
        // A long name does not fit with its indentation, so all rows are indented less.
        let long = "a_very_long_name_of_a_function_in_a_scope";
        assert_eq!(column_starts(&[(0, "main"), (1, "step"), (8, long), (2, "x")], 28), [1, 2, 2, 3, 9, 10, 3, 4]);
    }

    #[test]
    fn a_narrow_terminal_has_no_bars_and_smaller_gaps() {
        let amounts = Amounts::of([1 << 20]);
        let mut table = Table::new().column("place", Fit::LeftCutFront).amounts("at peak", amounts);
        table = table.amounts("at end", amounts).column("", Fit::Left);
        table.row([
            "/home/ada/project/src/models/train.py:42".into(),
            "1".into(),
            "1".into(),
            Cell::bar(1 << 20, 1 << 20),
        ]);
        let lines = |columns| {
            let text = InPaint(&table, Paint::PLAIN.in_columns(columns)).to_string();
            let width = text.lines().map(UnicodeWidthStr::width).max();
            assert!(width <= Some(columns), "{columns}:\n{text}");
            text.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(lines(80)[3], " /home/ada/project/src/models/train.py:42        1       1  ████████");
        assert_eq!(lines(60)[3], " …/project/src/models/train.py:42        1       1  ████████");
        assert_eq!(lines(46)[3], " …/src/models/train.py:42            1       1");
        assert_eq!(lines(29)[3], " …/train.py:42       1      1");
    }

    #[test]
    fn a_name_that_is_cut_says_most() {
        for (name, most, expected) in [
            ("src/a.rs:1", 10, "src/a.rs:1"),
            ("/home/ada/src/train.py:42", 20, "…/src/train.py:42"),
            ("a very long name of a scope", 12, "… of a scope"),
            ("step (/home/ada/src/train.py:42)", 26, "step (…/src/train.py:42)"),
            ("a::very::long::function (/home/ada/src/train.py:42)", 26, "…/ada/src/train.py:42)"),
            ("models/a-very-long-name-of-a-file.py:7", 22, "…g-name-of-a-file.py:7"),
        ] {
            assert_eq!(shortened(name, most), expected);
        }
    }

    #[test]
    fn a_command_line_loses_its_folders_before_its_end() {
        let line = "/opt/conda/envs/train/bin/python3.12 /home/ada/runs/train.py --data=/mnt/data/c4 --epochs 3";
        for (most, expected) in [
            (100, line),
            (80, "…/python3.12 /home/ada/runs/train.py --data=/mnt/data/c4 --epochs 3"),
            (60, "…/python3.12 …/train.py --data=/mnt/data/c4 --epochs 3"),
            (40, "…/python3.12 …/train.py --data=/mnt/dat…"),
            (8, "…/pytho…"),
        ] {
            assert_eq!(shortened_command(line, most), expected);
        }
        assert_eq!(shortened_command("a /", 2), "a…");
    }

    #[test]
    fn colours_take_no_room() {
        let mut table = Table::new().column("a", Fit::Left).column("b", Fit::Right);
        table.row([Cell::from("x").role(Role::More), "1".into()]);
        let (plain, coloured) = (InPaint(&table, Paint::PLAIN).to_string(), InPaint(&table, Paint::ANSI).to_string());
        assert!(coloured.contains("\u{1b}[32mx\u{1b}[0m"), "{coloured}");
        let mut stripped = coloured;
        for code in ["\u{1b}[32m", "\u{1b}[1m", "\u{1b}[2m", "\u{1b}[0m"] {
            stripped = stripped.replace(code, "");
        }
        assert_eq!(stripped, plain);
    }

    #[test]
    fn what_is_there_has_a_bar() {
        for (part, whole, bar) in [(0, 9, ""), (1, 1_000_000, "▏"), (1, 2, "████"), (9, 9, "████████"), (-3, 9, "")]
        {
            assert_eq!(Cell::bar(part, whole).text, bar);
        }
        assert_eq!(Cell::bar(i64::MAX, i64::MAX).text.chars().count(), BAR);
    }
}

//! Colours and widths for terminals. `Display` of a report uses plain text in 80 columns.

use std::fmt;

use anstyle::{AnsiColor, Style};

use crate::{
    model::one_line,
    report::{Breakdown, Leaks, MemorySummary, OutOfMemory, Output, PeakHolders, Peaks, Stats, Summary, Tracked},
};

/// The default width of reports.
const WIDTH: usize = 80;

/// The style of text: with or without colours, and the number of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paint {
    is_coloured: bool,
    width: usize,
}

impl Paint {
    /// Text without escape codes, in 80 columns.
    pub const PLAIN: Self = Self { is_coloured: false, width: WIDTH };
    /// Text with the escape codes of ANSI terminals, in 80 columns.
    pub const ANSI: Self = Self { is_coloured: true, width: WIDTH };

    /// Returns the same style with this number of columns.
    #[must_use]
    pub fn in_columns(self, width: usize) -> Self {
        Self { width, ..self }
    }

    /// Returns whether text is coloured.
    pub fn is_coloured(self) -> bool {
        self.is_coloured
    }

    /// Returns the largest number of columns of a line.
    pub fn width(self) -> usize {
        self.width
    }
}

/// The role of a piece of text. It decides the colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Text without a colour.
    #[default]
    Text,
    /// A title, or the name of a column.
    Heading,
    /// Less important text: rules, units, callers.
    Faint,
    /// A bar.
    Bar,
    /// An increase.
    More,
    /// A decrease.
    Less,
    /// Text that the reader must not miss.
    Alarm,
}

impl Role {
    const fn style(self) -> Style {
        match self {
            Self::Text => Style::new(),
            Self::Heading => Style::new().bold(),
            Self::Faint => Style::new().dimmed(),
            Self::Bar => AnsiColor::Cyan.on_default(),
            Self::More => AnsiColor::Green.on_default(),
            Self::Less => AnsiColor::Red.on_default(),
            Self::Alarm => AnsiColor::Red.on_default().bold(),
        }
    }
}

impl Paint {
    /// Returns the text in the colour of its role, on one line. The text must already include its padding, because
    /// escape codes have no width.
    pub fn on<T: fmt::Display>(self, role: Role, text: T) -> Painted<T> {
        Painted { style: if self.is_coloured { role.style() } else { Style::new() }, text }
    }
}

/// A text with its colour.
pub struct Painted<T> {
    style: Style,
    text: T,
}

impl<T: fmt::Display> fmt::Display for Painted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { style, text } = self;
        write!(f, "{style}{}{style:#}", one_line(&text.to_string()))
    }
}

/// Text that can be written with and without colours. `Display` writes the same as [`Paint::PLAIN`].
pub trait Show {
    /// Writes the text.
    ///
    /// # Errors
    /// Returns the error of the formatter.
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result;
}

/// Implements `Display` for these reports, in 80 columns and without colours.
#[doc(hidden)]
#[macro_export]
macro_rules! plain_display {
    ($($report:ty),* $(,)?) => {$(
        impl std::fmt::Display for $report {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $crate::export::Show::show(self, f, $crate::export::Paint::PLAIN)
            }
        }
    )*};
}

plain_display!(Breakdown, Leaks, MemorySummary, OutOfMemory, Output, PeakHolders, Peaks, Stats, Summary, Tracked);

/// Writes a value with or without colours.
pub struct InPaint<'a, T: ?Sized>(pub &'a T, pub Paint);

impl<T: Show + ?Sized> fmt::Display for InPaint<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.show(f, self.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_has_no_codes() {
        assert_eq!(Paint::PLAIN.on(Role::Alarm, "text").to_string(), "text");
        assert_eq!(Paint::PLAIN.on(Role::Text, "a\n\u{1b}[2J").to_string(), "a\\n\\u{1b}[2J");
        assert_eq!(Paint::ANSI.on(Role::Text, "text").to_string(), "text");
        assert_eq!(Paint::ANSI.on(Role::More, "+").to_string(), "\u{1b}[32m+\u{1b}[0m");
    }
}

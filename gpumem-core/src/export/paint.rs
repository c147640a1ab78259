//! Colours for terminals. `Display` of a report uses none.

use std::fmt;

use anstyle::{AnsiColor, Style};

/// Whether text is coloured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Paint {
    /// Text without escape codes.
    #[default]
    Plain,
    /// Text with the escape codes of ANSI terminals.
    Ansi,
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
    /// A rise.
    More,
    /// A fall.
    Less,
    /// What the reader must not miss.
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
    /// The text in the colour of its role. Padding must be in the text already: escape codes have no width.
    pub fn on<T: fmt::Display>(self, role: Role, text: T) -> Painted<T> {
        Painted { style: if self == Self::Ansi { role.style() } else { Style::new() }, text }
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
        write!(f, "{style}{text}{style:#}")
    }
}

/// Text that can be written with and without colours. `Display` writes the same as [`Paint::Plain`].
pub trait Show {
    /// Writes it.
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result;
}

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
        assert_eq!(Paint::Plain.on(Role::Alarm, "text").to_string(), "text");
        assert_eq!(Paint::Ansi.on(Role::Text, "text").to_string(), "text");
        assert_eq!(Paint::Ansi.on(Role::More, "+").to_string(), "\u{1b}[32m+\u{1b}[0m");
    }
}

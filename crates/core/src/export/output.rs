//! Writes everything that gpumem prints as text.

use std::fmt;

use super::paint::{InPaint, Paint, Role, Show};
use crate::{
    model::one_line,
    report::{Content, Output, Peaks},
};

/// Returns the output as text, without a line break at the end.
pub(super) fn text(output: &Output, paint: Paint) -> String {
    InPaint(output, paint).to_string()
}

/// Writes the text as it is printed.
impl Show for Output {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        if !self.content.is_report() {
            write!(f, "{} ", paint.on(Role::Heading, "gpumem:"))?;
        }
        let pid = self.pid;
        match &self.content {
            Content::Trace(report) => report.show(f, paint),
            Content::Stats(stats) => stats.show(f, paint),
            Content::Tracked(tracked) => tracked.show(f, paint),
            Content::OutOfMemory(oom) => oom.show(f, paint),
            Content::Leaks(leaks) => {
                write!(f, "process {pid} ends, and ")?;
                leaks.show(f, paint)
            }
            Content::Peaks(peaks) => {
                writeln!(f, "process {pid} ends. Its peaks:")?;
                peaks.show(f, paint)
            }
            Content::Budget(text) | Content::Notice(text) => f.write_str(&one_line(text)),
        }
    }
}

impl Show for Peaks {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        for (at, peak) in self.devices.iter().enumerate() {
            f.write_str(if at > 0 { "\n\n" } else { "" })?;
            peak.show(f, paint)?;
        }
        if self.devices.is_empty() {
            f.write_str("no allocation was seen")?;
        }
        if !self.is_intercepted {
            let text = "allocations are not intercepted: there may have been more";
            write!(f, "\n{}", paint.on(Role::Alarm, text))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::{
        export::Form,
        model::Trace,
        report::{Leaks, Report},
    };

    fn written(content: Content, paint: Paint) -> String {
        Form::Text.write(&Output::new(content, UNIX_EPOCH, 7), paint)
    }

    #[test]
    fn one_line_break_is_at_the_end() {
        let report = Report::new(Trace::off(0), Some("f"), None);
        assert_eq!(written(Content::Trace(report), Paint::PLAIN), "△Used Peaked MB:      ?      ? (f)\n");
        assert_eq!(written(Content::Notice("text".to_owned()), Paint::PLAIN), "gpumem: text\n");
        let leaks = Leaks { is_intercepted: false, gone: 2, ..Leaks::of(&[]) };
        assert_eq!(
            written(Content::Leaks(leaks), Paint::PLAIN),
            "gpumem: process 7 ends, and everything that was allocated has been freed\n\
             2 blocks disappeared with their CUDA context, without a free\n\
             allocations are not intercepted: there may be more\n"
        );
        let peaks = Peaks::new(Vec::new(), false);
        assert_eq!(
            written(Content::Peaks(peaks), Paint::PLAIN),
            "gpumem: process 7 ends. Its peaks:\nno allocation was seen\n\
             allocations are not intercepted: there may have been more\n"
        );
    }

    #[test]
    fn the_line_of_fastai_has_no_colour() {
        let report = || Content::Trace(Report::new(Trace::off(0), Some("f"), None));
        assert_eq!(written(report(), Paint::ANSI), written(report(), Paint::PLAIN));
        let notice = written(Content::Notice("text".to_owned()), Paint::ANSI);
        assert_eq!(notice, "\u{1b}[1mgpumem:\u{1b}[0m text\n");
    }
}

//! The terminal: as it was before, however the command ends.

use std::{io, panic, sync::Once};

use ratatui::{
    Frame, Terminal,
    backend::CrosstermBackend,
    crossterm::{
        cursor::Show,
        event::{DisableMouseCapture, EnableMouseCapture},
        execute,
        terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode},
    },
};

pub(super) struct Screen(Terminal<CrosstermBackend<io::Stdout>>);

impl Screen {
    pub(super) fn open() -> io::Result<Self> {
        static HOOK: Once = Once::new();
        // The message of a panic is to be seen, on a terminal that works.
        HOOK.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |why| {
                close();
                before(why);
            }));
        });
        enable_raw_mode()?;
        let opened = execute!(io::stdout(), EnterAlternateScreen, EnableMouseCapture);
        let terminal = opened.and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        terminal.map(Self).inspect_err(|_| close())
    }

    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.0.draw(draw).map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        close();
    }
}

fn close() {
    // There is no other terminal.
    _ = execute!(io::stdout(), DisableMouseCapture, LeaveAlternateScreen, Show);
    _ = disable_raw_mode();
}

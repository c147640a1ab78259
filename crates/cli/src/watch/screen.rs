//! The terminal. However the command ends, the terminal's earlier state is restored.

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
use rustix::process::{Signal, kill_current_process_group};

pub(super) struct Screen(Terminal<CrosstermBackend<io::Stdout>>);

impl Screen {
    pub(super) fn open() -> io::Result<Self> {
        static HOOK: Once = Once::new();
        // The message of a panic must appear on a working terminal.
        HOOK.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |why| {
                close();
                before(why);
            }));
        });
        enter().map(Self).inspect_err(|_| close())
    }

    /// Stops this process and its process group, as Ctrl-Z does without raw mode. Returns when the process continues,
    /// or at once if there is no shell that could continue it.
    #[expect(clippy::unused_self, reason = "there must be a screen")]
    pub(super) fn suspend(&mut self) -> io::Result<()> {
        close();
        Ok(kill_current_process_group(Signal::TSTP)?)
    }

    /// Draws on a terminal that other programs have used.
    pub(super) fn reopen(&mut self) -> io::Result<()> {
        // They may have changed its settings.
        disable_raw_mode()?;
        // `Terminal::clear` asks the terminal for the cursor's position, and some terminals do not answer.
        self.0 = enter()?;
        Ok(())
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

fn enter() -> io::Result<Terminal<CrosstermBackend<io::Stdout>>> {
    enable_raw_mode()?;
    execute!(io::stdout(), EnterAlternateScreen, EnableMouseCapture)?;
    Terminal::new(CrosstermBackend::new(io::stdout()))
}

fn close() {
    // If this fails, there is no other terminal to report it on.
    _ = execute!(io::stdout(), DisableMouseCapture, LeaveAlternateScreen, Show);
    _ = disable_raw_mode();
}

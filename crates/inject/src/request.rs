//! The recordings that the command requests.

use std::{
    env,
    path::{Path, PathBuf},
    process,
};

use gpumem::recording::{self, Keep};
use gpumem_driver::lock_file::{lock_file, note};

use crate::{
    options::{self, Options},
    recordings, torch, variable,
};

/// The options and the file of a recording.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The base of the file name. Each process adds its rank and process id before the extension.
    pub(crate) file: PathBuf,
    pub(crate) options: Options,
    /// True if the process may already have allocated memory.
    pub(crate) is_late: bool,
}

/// Reads the options from the environment. Returns `None` if there are none.
pub(crate) fn options() -> Result<Option<Options>, String> {
    env::var(variable::OPTIONS).ok().filter(|text| !text.is_empty()).map(|text| Options::parse(&text)).transpose()
}

impl Request {
    /// Reads the request from the environment.
    pub(crate) fn of_environment() -> Result<Self, String> {
        let missing = |variable| format!("{variable} is not set; start the program with `gpumem run`");
        // If there is no file, something other than the command has set `CUDA_INJECTION64_PATH` to this library.
        let file =
            env::var_os(variable::FILE).filter(|file| !file.is_empty()).ok_or_else(|| missing(variable::FILE))?;
        let options = options()?.ok_or_else(|| missing(variable::OPTIONS))?;
        Ok(Self { file: file.into(), options, is_late: false })
    }

    /// Starts the recording. Returns its file.
    pub(crate) fn record(&self) -> Result<PathBuf, String> {
        let Self { file: base, options: Options { backtrace, keep, torch, cards: _ }, is_late } = self;
        let file = free_name(base, gpumem_driver::process::rank(), process::id());
        recording::serve_foreign_program(backtrace);
        // The command checks at the end whether the recording exists. The name is noted first, because the file may be removed while the
        // recording starts. There may be no command: see `gpumem attach`.
        _ = note(&lock_file(base, "lock"), &file);
        let start = if *is_late { recording::start } else { recording::start_at_launch };
        let keep = match *keep {
            options::Keep::All => Keep::All,
            options::Keep::Latest(bytes) => Keep::Latest(bytes),
            options::Keep::Peaks => Keep::Peaks,
        };
        start(&file, keep).map_err(|why| format!("cannot record to {}: {why}", file.display()))?;
        recordings::change();
        if let Some(torch) = torch {
            torch::start(&file, *torch);
        }
        Ok(file)
    }

    /// Returns whether the history of PyTorch's allocator is recorded.
    pub(crate) fn has_torch(&self) -> bool {
        self.options.torch.is_some()
    }
}

fn free_name(file: &Path, rank: Option<u64>, pid: u32) -> PathBuf {
    let name = |count| variable::file_of_process(file, rank, pid, count);
    // Only this process uses names with its id, so no other process creates the file in between.
    (1..1_000).map(name).find(|path| !path.exists()).unwrap_or_else(|| name(1_000))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn each_process_has_a_file_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let name = |file: &str, rank| {
            let path = free_name(&folder.path().join(file), rank, 17);
            path.strip_prefix(&folder).unwrap().to_str().unwrap().to_owned()
        };
        assert_eq!(name("train.gpumem", None), "train.pid17.gpumem");
        assert_eq!(name("a.b.gpumem", Some(3)), "a.b.rank3.pid17.gpumem");
        assert_eq!(name("train", Some(0)), "train.rank0.pid17");
        fs::write(folder.path().join("train.pid17.gpumem"), "").unwrap();
        assert_eq!(name("train.gpumem", None), "train.pid17.2.gpumem");
    }
}

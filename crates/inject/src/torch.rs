//! The history of PyTorch's allocator. PyTorch keeps it, and `torch.py` writes it to a file next to the recording.

use std::{
    ffi::CString,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use gpumem_driver::python;

use crate::{options::Torch, variable};

/// The code that runs in the program.
const CODE: &str = include_str!("torch.py");
/// The code that runs after it, if modules are requested.
const MODULES: &str = include_str!("modules.py");

/// The maximum wait for the history when a recording ends before the program.
const PATIENCE: Duration = Duration::from_secs(20);

/// Makes PyTorch keep the events of each device, as soon as the program has imported PyTorch and initialised CUDA.
pub(crate) fn start(recording: &Path, Torch { events, modules }: Torch) {
    let path = variable::python_bytes(variable::torch_file(recording).as_os_str().as_bytes());
    let again = format!("begin({path}, {events})\n");
    // Without an interpreter there is no PyTorch. The command reports that.
    run(&format!("{}{again}", code(modules)), &again);
}

/// Returns the code that runs in the program.
pub(crate) fn code(modules: bool) -> String {
    format!("{CODE}\n{}\n", if modules { MODULES } else { "" })
}

/// Makes PyTorch's history be written when a recording ends before the program, and waits until the file is complete.
pub(crate) fn end(recording: &Path) {
    let file = variable::torch_file(recording);
    let until = Instant::now() + PATIENCE;
    if unfinished(&file).exists() && run("", "finish()\n") {
        while !file.exists() && Instant::now() < until {
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn unfinished(file: &Path) -> PathBuf {
    let mut path = file.as_os_str().to_owned();
    path.push(variable::UNFINISHED);
    path.into()
}

fn run(first: &str, again: &str) -> bool {
    // Our texts contain no zero bytes.
    let (Ok(first), Ok(again)) = (CString::new(first), CString::new(again)) else { return false };
    python::run(&first, &again)
}

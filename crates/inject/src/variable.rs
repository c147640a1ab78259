//! The environment variables in which the command passes the options of a recording.

use std::{
    fmt::Write,
    path::{Path, PathBuf},
};

/// Names the library that the driver loads.
pub const INJECTION: &str = "CUDA_INJECTION64_PATH";

/// Names the library that NVTX loads.
pub const NVTX: &str = "NVTX_INJECTION64_PATH";

/// The previous values of [`INJECTION`] and [`NVTX`]: libraries of other tools, which are loaded as well.
pub const OTHER_INJECTION: &str = "GPUMEM_RUN_OTHER_INJECTION";
/// See [`OTHER_INJECTION`].
pub const OTHER_NVTX: &str = "GPUMEM_RUN_OTHER_NVTX";

/// The file of the recording. Each process adds its rank and its process id to the name, before the extension.
pub const FILE: &str = "GPUMEM_RUN_FILE";

/// Turns `train.gpumem` into `train.rank3.pid17.gpumem` for a process. A process that calls `exec` keeps its id, so the next program in it
/// gets the file `train.rank3.pid17.2.gpumem`.
pub fn file_of_process(file: &Path, rank: Option<u64>, pid: u32, count: u32) -> PathBuf {
    let mut name = file.file_stem().unwrap_or(file.as_os_str()).to_owned();
    if let Some(rank) = rank {
        name.push(format!(".rank{rank}"));
    }
    name.push(format!(".pid{pid}"));
    if count > 1 {
        name.push(format!(".{count}"));
    }
    if let Some(extension) = file.extension() {
        name.push(".");
        name.push(extension);
    }
    file.with_file_name(name)
}

/// The [`Options`](crate::options::Options) as text.
pub const OPTIONS: &str = "GPUMEM_RUN_OPTIONS";

/// The folder of the sockets. If it is set, nothing is recorded until a command connects to the [`socket`] of the process.
pub const CONTROL: &str = "GPUMEM_RUN_CONTROL";

/// Returns the socket in this folder on which a process waits for commands.
pub fn socket(folder: &Path, pid: u32) -> PathBuf {
    folder.join(format!("{pid}.sock"))
}

/// The message to that socket that starts the recording; [`STOP`] ends it. The answer is [`DONE`] and the file of the recording, or an
/// error. Then the connection is closed.
pub const START: &str = "start\n";
/// See [`START`].
pub const STOP: &str = "stop\n";
/// See [`START`].
pub const DONE: &str = "done ";

/// The name of the file that is preloaded before the CUDA runtime if a program sees several simulated GPUs.
pub const RUNTIME: &str = "libgpumem_runtime";

/// The UUIDs of CUDA's devices, separated by commas, for processes that ask NVML for the memory of replaced GPUs.
pub const DEVICES: &str = "GPUMEM_RUN_DEVICES";

/// Returns the file of the history of PyTorch's allocator, next to the recording. Until the history is complete, the name ends in
/// [`UNFINISHED`].
pub fn torch_file(recording: &Path) -> PathBuf {
    let mut path = recording.as_os_str().to_owned();
    path.push(".torch");
    path.into()
}

/// See [`torch_file`].
pub const UNFINISHED: &str = ".part";

/// Returns the bytes as a Python expression.
pub fn python_bytes(bytes: &[u8]) -> String {
    let mut text = "bytes.fromhex('".to_owned();
    for byte in bytes {
        _ = write!(text, "{byte:02x}");
    }
    text + "')"
}

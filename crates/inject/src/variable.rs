//! The variables by which the command passes the options of a recording.

use std::{
    fmt::Write,
    path::{Path, PathBuf},
};

/// The driver loads the library that this variable names.
pub const INJECTION: &str = "CUDA_INJECTION64_PATH";

/// NVTX loads the library that this variable names.
pub const NVTX: &str = "NVTX_INJECTION64_PATH";

/// The earlier values of [`INJECTION`] and [`NVTX`]: the libraries of other tools, which are loaded as well.
pub const OTHER_INJECTION: &str = "GPUMEM_RUN_OTHER_INJECTION";
/// See [`OTHER_INJECTION`].
pub const OTHER_NVTX: &str = "GPUMEM_RUN_OTHER_NVTX";

/// The file of the recording. The name of each process's file has more before the extension: its rank and its number.
pub const FILE: &str = "GPUMEM_RUN_FILE";

/// Turns `train.gpumem` into `train.rank3.pid17.gpumem` for a process. A process that calls `exec` keeps its number, so the next program
/// in it has a file `train.rank3.pid17.2.gpumem`.
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

/// The allocations whose stack is recorded: a value of gpumem's setting `GPUMEM_BACKTRACE`. That variable itself is for the program,
/// which may use gpumem.
pub const BACKTRACE: &str = "GPUMEM_RUN_BACKTRACE";

/// The folder of the sockets. If it is set, nothing is recorded until a command connects to the socket `PID.sock` in
/// it.
pub const CONTROL: &str = "GPUMEM_RUN_CONTROL";

/// The message of a command to that socket: the recording has to begin, or to end. The answer is [`DONE`] and the file of the
/// recording, or an error; then the connection ends.
pub const START: &str = "start\n";
/// See [`START`].
pub const STOP: &str = "stop\n";
/// See [`START`].
pub const DONE: &str = "done ";

/// The part that the recording keeps: [`PEAKS`], or the most bytes of a recording of the newest events. If it is not
/// set, everything is kept.
pub const KEEP: &str = "GPUMEM_RUN_KEEP";
/// See [`KEEP`].
pub const PEAKS: &str = "peaks";

/// The process has cards of another size: `dry`, `dry BYTES`, or `limit BYTES`. After `dry`, `cards COUNT` and `fill BYTE` may
/// follow, and at the end `shared NUMBER`: the segment of shared memory in which processes note their memory on the cards.
pub const CARDS: &str = "GPUMEM_RUN_CARDS";

/// The name of the file that is preloaded before the CUDA runtime if a program sees several cards.
pub const RUNTIME: &str = "libgpumem_runtime";

/// The UUIDs of CUDA's devices, with commas between them, for processes that ask NVML for the memory of such cards.
pub const DEVICES: &str = "GPUMEM_RUN_DEVICES";

/// The largest number of events of each device in the history of PyTorch's allocator, if it is recorded. [`MODULES`] after the number
/// asks for the modules as well.
pub const TORCH: &str = "GPUMEM_RUN_TORCH";

/// See [`TORCH`].
pub const MODULES: &str = ",modules";

/// Returns the file of that history, beside a recording. Until all of it is there, its name ends in [`UNFINISHED`].
pub fn torch_file(recording: &Path) -> PathBuf {
    let mut path = recording.as_os_str().to_owned();
    path.push(".torch");
    path.into()
}

/// See [`torch_file`].
pub const UNFINISHED: &str = ".part";

/// Returns bytes as an expression of Python.
pub fn python_bytes(bytes: &[u8]) -> String {
    let mut text = "bytes.fromhex('".to_owned();
    for byte in bytes {
        _ = write!(text, "{byte:02x}");
    }
    text + "')"
}

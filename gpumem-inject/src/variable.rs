//! The variables by which the command says what is to be recorded.

use std::{
    fmt::Write,
    path::{Path, PathBuf},
};

/// The driver loads the library that this variable names.
pub const INJECTION: &str = "CUDA_INJECTION64_PATH";

/// NVTX loads the library that this variable names.
pub const NVTX: &str = "NVTX_INJECTION64_PATH";

/// What [`INJECTION`] and [`NVTX`] named before `gpumem run`: the libraries of other tools, which are loaded as well.
pub const OTHER_INJECTION: &str = "GPUMEM_RUN_OTHER_INJECTION";
/// See [`OTHER_INJECTION`].
pub const OTHER_NVTX: &str = "GPUMEM_RUN_OTHER_NVTX";

/// The file of the recording. The name of each process's file has more before the extension: its rank and its number.
pub const FILE: &str = "GPUMEM_RUN_FILE";

/// The allocations whose stack is recorded: a value of gpumem's setting `GPUMEM_BACKTRACE`. That variable itself is for the program,
/// which may use gpumem.
pub const BACKTRACE: &str = "GPUMEM_RUN_BACKTRACE";

/// A folder. If it is set, nothing is recorded until a command connects to the socket `PID.sock` in it.
pub const CONTROL: &str = "GPUMEM_RUN_CONTROL";

/// What a command sends to that socket: the recording is to begin, or to end. The answer is [`DONE`] and the file of the recording, or
/// what went wrong; then the connection ends.
pub const START: &str = "start\n";
/// See [`START`].
pub const STOP: &str = "stop\n";
/// See [`START`].
pub const DONE: &str = "done ";

/// What is kept in the recording: [`PEAKS`], or the most bytes of a recording of the newest events. Not set: everything.
pub const KEEP: &str = "GPUMEM_RUN_KEEP";
/// See [`KEEP`].
pub const PEAKS: &str = "peaks";

/// The process has cards of another size: `dry`, `dry BYTES`, or `limit BYTES`; after `dry`, `cards COUNT` and `fill BYTE`
/// may follow, and at the end `shared NUMBER`: the segment of shared memory in which processes say what they have on the cards.
pub const CARDS: &str = "GPUMEM_RUN_CARDS";

/// How the file is named that is preloaded before the CUDA runtime where a program sees several cards.
pub const RUNTIME: &str = "libgpumem_runtime";

/// The UUIDs of CUDA's devices, with commas between them, for processes that ask NVML for the memory of such cards.
pub const DEVICES: &str = "GPUMEM_RUN_DEVICES";

/// The history of PyTorch's allocator is recorded, with so many events of each device at most. [`MODULES`] after the number asks for the
/// modules as well.
pub const TORCH: &str = "GPUMEM_RUN_TORCH";

/// See [`TORCH`].
pub const MODULES: &str = ",modules";

/// The file of that history, beside a recording. Until all of it is there, its name ends in [`UNFINISHED`].
pub fn torch_file(recording: &Path) -> PathBuf {
    let mut path = recording.as_os_str().to_owned();
    path.push(".torch");
    path.into()
}

/// See [`torch_file`].
pub const UNFINISHED: &str = ".part";

/// Bytes as an expression of Python.
pub fn python_bytes(bytes: &[u8]) -> String {
    let mut text = "bytes.fromhex('".to_owned();
    for byte in bytes {
        _ = write!(text, "{byte:02x}");
    }
    text + "')"
}

//! The variables by which the command says what is to be recorded.

/// By which the driver finds the library.
pub const INJECTION: &str = "CUDA_INJECTION64_PATH";

/// The file of the recording. The name of each process's file has more before the extension: its rank and its number.
pub const FILE: &str = "GPUMEM_RUN_FILE";

/// `none`: no stacks.
pub const STACKS: &str = "GPUMEM_RUN_STACKS";

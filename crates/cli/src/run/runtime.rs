//! The library that the loader searches before the CUDA runtime, in programs that see several GPUs. It is preloaded, so
//! the loader finds its functions before the runtime's. They only call `gpumem_pass` of the injected library.
//! Other programs do not get this library.

use std::{
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use gpumem_driver::dry::runtime;
use gpumem_inject::variable;

use super::{forwarding_library::ForwardingLibrary, library};

/// Unpacks the library and returns its path.
pub(super) fn unpacked(injected: &Path) -> io::Result<PathBuf> {
    let library = ForwardingLibrary {
        name: variable::RUNTIME,
        needed: &[injected.as_os_str().as_bytes()],
        functions: &runtime::names().map(|name| (name, name.into())).collect::<Vec<_>>(),
    }
    .image()?;
    let path = injected.with_file_name(format!("{}-{:08x}.so", variable::RUNTIME, library::hash(&library)));
    library::unpack_as(&path, &library)?;
    Ok(path)
}

//! The library that is loaded ahead of NVML in programs whose GPUs are not the real ones.
//!
//! Programs reach NVML through `dlopen("libnvidia-ml.so.1")` and `dlsym`, often before they initialise CUDA. Therefore,
//! a folder with a library of this name comes first on their `LD_LIBRARY_PATH`. The library depends on the injected
//! library and on the real one, in which `dlsym` finds all other functions. Its own functions only call `gpumem_pass`
//! of the injected library.

use std::{
    env,
    ffi::OsStr,
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use gpumem_driver::source::machine::{cuda_devices, nvml_file};
use gpumem_inject::variable;
use object::{Object, ObjectSymbol};

use super::{forwarding_library::ForwardingLibrary, library, program::Program};

const NAME: &str = "libnvidia-ml.so.1";

/// Names of folders with such a library start with this.
const FOLDERS: &str = "nvml-";

/// Sets the environment so that the program's NVML shows its GPUs. With `all`, every function is replaced, because
/// handles are not NVML's. Without NVML or a device on the machine, nothing is done.
pub(super) fn put_before(program: &mut Program, injected: &Path, all: bool) -> io::Result<()> {
    let (Ok(real), Ok(devices)) = (nvml_file(), cuda_devices()) else { return Ok(()) };
    program.first_in("LD_LIBRARY_PATH", folder(injected, &real.canonicalize()?, all)?);
    let devices: Vec<_> = devices.into_iter().map(|device| device.uuid).collect();
    program.environment(variable::DEVICES, devices.join(","));
    Ok(())
}

/// Returns the folder that contains the library.
fn folder(injected: &Path, real: &Path, all: bool) -> io::Result<PathBuf> {
    let bytes = fs::read(real)?;
    let file = object::File::parse(&*bytes).map_err(io::Error::other)?;
    let is_replaced = |name: &&str| match *name {
        "nvmlDeviceGetMemoryInfo" | "nvmlDeviceGetMemoryInfo_v2" => true,
        name => all && name.starts_with("nvml"),
    };
    let defined = file.dynamic_symbols().filter(ObjectSymbol::is_definition);
    let names: Vec<_> = defined.filter_map(|symbol| symbol.name().ok()).filter(is_replaced).collect();
    let real = real.as_os_str().as_bytes();
    let library = ForwardingLibrary {
        name: NAME,
        needed: &[injected.as_os_str().as_bytes(), real],
        functions: &names.iter().map(|name| (*name, [name.as_bytes(), b" ", real].concat())).collect::<Vec<_>>(),
    }
    .image()?;
    let folder = injected.with_file_name(format!("{FOLDERS}{:08x}", library::hash(&library)));
    library::unpack_as(&folder.join(NAME), &library)?;
    remove_stale(injected);
    Ok(folder)
}

/// Removes the folders of libraries that can no longer be loaded, because a file that they depend on is gone, such as
/// an older driver. Only temporary folders are cleaned: the cache in a home folder may be shared by several machines,
/// which have other files.
fn remove_stale(injected: &Path) {
    let Some(all) = injected.parent().filter(|folder| folder.starts_with(env::temp_dir())) else { return };
    for folder in fs::read_dir(all).into_iter().flatten().flatten() {
        let is_of_nvml = folder.file_name().as_bytes().starts_with(FOLDERS.as_bytes());
        let library = fs::read(folder.path().join(NAME)).ok().filter(|_| is_of_nvml);
        if library.is_some_and(|library| is_stale(&library)) {
            _ = fs::remove_dir_all(folder.path());
        }
    }
}

/// Returns whether a library depends on a file that is gone. The library contains the paths as texts that end with a zero.
fn is_stale(library: &[u8]) -> bool {
    // Code and tables contain a byte that looks like the start of a path, too.
    let is_library = |text: &&[u8]| text.starts_with(b"/") && text.windows(3).any(|part| part == b".so");
    let mut libraries = library.split(|byte| *byte == 0).filter(is_library);
    libraries.any(|path| !Path::new(OsStr::from_bytes(path)).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_library_that_is_gone_makes_another_stale() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().join("libnvidia-ml.so.580");
        // The bytes between the paths are an offset.
        let library = [b"\x7fELF\0", real.as_os_str().as_bytes(), b"\0/\x10\0/\0", b"nvmlInit /lib/x.so\0"].concat();
        assert!(is_stale(&library));
        fs::write(&real, "").unwrap();
        assert!(!is_stale(&library));
    }
}

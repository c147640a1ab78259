//! The library that stands before NVML in programs whose cards are not the real ones.
//!
//! Programs reach NVML by `dlopen("libnvidia-ml.so.1")` and `dlsym`, often before they initialise CUDA. So a folder with a library of this
//! name is the first on their `LD_LIBRARY_PATH`. It depends on the injected library and on the real one, in which `dlsym` finds all other
//! functions. Its functions only call `gpumem_pass` of the injected library.

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

use super::{library, passing::Passing, program::Program};

const NAME: &str = "libnvidia-ml.so.1";

/// The beginning of the names of the folders with such a library.
const FOLDERS: &str = "nvml-";

/// Sets the environment in which the program's NVML shows its cards. With `all`, handles are not those of NVML, so each function is
/// replaced. Nothing is done if the machine has no NVML, or no device.
pub(super) fn put_before(program: &mut Program, injected: &Path, all: bool) -> io::Result<()> {
    let (Ok(real), Ok(devices)) = (nvml_file(), cuda_devices()) else { return Ok(()) };
    program.first_in("LD_LIBRARY_PATH", folder(injected, &real.canonicalize()?, all)?);
    let devices: Vec<_> = devices.into_iter().map(|device| device.uuid).collect();
    program.environment(variable::DEVICES, devices.join(","));
    Ok(())
}

/// Returns the folder with the library.
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
    let library = Passing {
        name: NAME,
        needed: &[injected.as_os_str().as_bytes(), real],
        functions: &names.iter().map(|name| (*name, [name.as_bytes(), b" ", real].concat())).collect::<Vec<_>>(),
    }
    .image();
    let folder = injected.with_file_name(format!("{FOLDERS}{:08x}", library::hash(&library)));
    library::unpack_as(&folder.join(NAME), &library)?;
    remove_stale(injected);
    Ok(folder)
}

/// Removes the folders of libraries that cannot be loaded any more, because a file that they depend on is gone, such as an older driver.
/// This is done among temporary files only: the cache in a home folder may belong to several machines, which have other files.
fn remove_stale(injected: &Path) {
    let Some(all) = injected.parent().filter(|folder| folder.starts_with(env::temp_dir())) else { return };
    let is_missing = |text: &[u8]| text.starts_with(b"/") && !Path::new(OsStr::from_bytes(text)).exists();
    for folder in fs::read_dir(all).into_iter().flatten().flatten() {
        let is_of_nvml = folder.file_name().as_bytes().starts_with(FOLDERS.as_bytes());
        // The file names what it depends on in texts that end with a zero.
        let library = fs::read(folder.path().join(NAME)).ok().filter(|_| is_of_nvml);
        if library.is_some_and(|library| library.split(|byte| *byte == 0).any(is_missing)) {
            _ = fs::remove_dir_all(folder.path());
        }
    }
}

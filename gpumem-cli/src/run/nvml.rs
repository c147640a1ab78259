//! The library that stands before NVML in programs whose cards are not the real ones.
//!
//! Programs reach NVML by `dlopen("libnvidia-ml.so.1")` and `dlsym`, often before they initialise CUDA. So a folder with a library of this
//! name is the first on their `LD_LIBRARY_PATH`. It depends on the injected library and on the real one, in which `dlsym` finds all other
//! functions. Its functions only call `gpumem_pass` of the injected library.

use std::{
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use gpumem_driver::source::machine::{cuda_devices, nvml_file};
use gpumem_inject::variable;
use object::{Object, ObjectSymbol};

use super::{library, passing::Passing, program::Program};

const NAME: &str = "libnvidia-ml.so.1";

/// Sets the environment in which the program's NVML shows its cards. With `all`, handles are not those of NVML, so each function is
/// replaced. Nothing is done if the machine has no NVML, or no device.
pub(super) fn put_before(program: &mut Program, injected: &Path, all: bool) -> io::Result<()> {
    let (Ok(real), Ok(devices)) = (nvml_file(), cuda_devices()) else { return Ok(()) };
    program.first_in("LD_LIBRARY_PATH", folder(injected, &real.canonicalize()?, all)?);
    let devices: Vec<_> = devices.into_iter().map(|device| device.uuid).collect();
    program.environment(variable::DEVICES, devices.join(","));
    Ok(())
}

/// The folder with the library.
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
    let folder = injected.with_file_name(format!("nvml-{:08x}", library::hash(&library)));
    library::unpack_as(&folder.join(NAME), &library)?;
    Ok(folder)
}

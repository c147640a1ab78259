//! Finds libraries, and checks that they have the functions that will be called.

use std::{
    env,
    error::Error as _,
    fs,
    path::{Path, PathBuf},
};

use libloading::Library;

use crate::{
    error::{Error, Kind},
    settings::settings,
};

/// The reason why a library is not loaded into a program that was not built for gpumem.
pub(super) const FOREIGN: &str = "gpumem does not load it into a program that does not know gpumem";

/// Loads the first of `names` that can be loaded, checks that it has all of `symbols`, and keeps it loaded.
///
/// cudarc's loader tries the same names, so it later finds the library that was checked here. cudarc panics if a library or a symbol is
/// missing, which this library must not do.
pub(super) fn load(library: &'static str, names: &[&str], symbols: &[&str]) -> Result<(), Error> {
    let (loaded, _) = open(library, names.iter().map(PathBuf::from))?;
    let missing = symbols.iter().find(|symbol| {
        // SAFETY: the symbol is only looked up, as an address that is never called or read here.
        unsafe { loaded.get::<*const ()>(symbol.as_bytes()) }.is_err()
    });
    if let Some(symbol) = missing {
        return Err(Kind::NoSymbol { library, symbol: (*symbol).to_owned() }.into());
    }
    // The library is never unloaded: a driver library that is unloaded and loaded again would lose its state.
    std::mem::forget(loaded);
    Ok(())
}

/// Loads the first of `paths` that can be loaded. Returns the library and its path.
pub(super) fn open(
    library: &'static str,
    paths: impl IntoIterator<Item = PathBuf>,
) -> Result<(Library, PathBuf), Error> {
    let mut detail = String::new();
    for path in paths {
        // Opening a pipe would block the loader. It does not look up a name without a folder in the working directory, so such a name is
        // not checked.
        if path.components().count() > 1 && path.exists() && !path.is_file() {
            detail = format!("{} is not a file", path.display());
            continue;
        }
        // SAFETY: loading runs the library's initializers. The names belong to NVIDIA's libraries, whose
        // initializers have no preconditions; a library with that name that the user put on the path is as trusted as the user's own
        // code.
        match unsafe { Library::new(&path) } {
            Ok(loaded) => return Ok((loaded, path)),
            // The loader's own message is the source of the error.
            Err(error) => detail = error.source().map_or_else(|| error.to_string(), ToString::to_string),
        }
    }
    Err(Kind::NoLibrary { library, detail }.into())
}

/// Returns a symbol of the first of `names` that can be loaded, or `None` if the library does not have the symbol. The library is never
/// unloaded.
///
/// # Safety
/// `T` must be the type of the symbol.
pub(super) unsafe fn symbol<T: Copy>(names: &[&str], symbol: &std::ffi::CStr) -> Option<T> {
    let (library, _) = open("", names.iter().map(PathBuf::from)).ok()?;
    // SAFETY: the type is required by this function's contract.
    let found = unsafe { library.get::<T>(symbol.to_bytes_with_nul()) }.ok().map(|found| *found);
    std::mem::forget(library);
    found
}

const CUPTI_NAMES: &[&str] = &["libcupti.so.13", "libcupti.so.12", "libcupti.so"];

/// Returns where `libcupti` may be: `GPUMEM_CUPTI`, the loader's own path, the toolkit, Python packages. The driver does not contain it,
/// and toolkits do not put it on the loader's path.
pub(super) fn cupti_paths() -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = Vec::new();
    if let Some(named) = settings().cupti.clone() {
        if named.is_dir() {
            paths.extend(CUPTI_NAMES.iter().map(|name| named.join(name)));
        } else {
            // The user named this file, so only it is tried.
            return vec![named];
        }
    }
    paths.extend(CUPTI_NAMES.iter().map(PathBuf::from));
    let mut folders = Vec::new();
    let toolkits = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"].iter().filter_map(env::var_os).map(PathBuf::from);
    for toolkit in toolkits.chain([PathBuf::from("/usr/local/cuda")]).chain(matching(Path::new("/usr/local"), "cuda-"))
    {
        let inside = ["extras/CUPTI/lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib64"];
        folders.extend(inside.map(|folder| toolkit.join(folder)));
    }
    for python in ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(env::var_os).map(PathBuf::from) {
        for version in matching(&python.join("lib"), "python3") {
            let packages = version.join("site-packages/nvidia");
            folders.extend(["cu13/lib", "cuda_cupti/lib"].map(|folder| packages.join(folder)));
        }
    }
    let files = folders.iter().flat_map(|folder| CUPTI_NAMES.iter().map(|name| folder.join(name)));
    paths.extend(files.filter(|file| file.exists()));
    paths
}

/// Returns the entries of a folder whose names start with `prefix`, the latest version first.
fn matching(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    found.sort_by_key(|path| {
        let numbers = path.to_string_lossy().into_owned();
        numbers.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect::<Vec<u64>>()
    });
    found.reverse();
    found
}

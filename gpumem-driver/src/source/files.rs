//! The program and the libraries that are loaded into it.

use std::{path::PathBuf, sync::Arc};

use once_cell::sync::OnceCell;

use crate::{
    model::is_gpumem_c,
    sys::{loader, process},
};

pub use crate::sys::loader::LoadedFile;

/// Returns the files that contain return addresses, and the addresses at which they are mapped. `None` if a file is not known.
pub fn files_of(addresses: &[usize]) -> Vec<Option<Arc<LoadedFile>>> {
    loader::files_of(addresses)
}

/// Returns the file name of the program or library that contains this crate; that of the program, if it is the library for programs in
/// C. `None` if it is not known.
pub fn own_module() -> Option<String> {
    static OWN: OnceCell<Option<String>> = OnceCell::new();
    let find = || {
        let here = own_module as *const ();
        let name = |path: PathBuf| Some(path.file_name()?.to_string_lossy().into_owned());
        let own = name(loader::file_of(here.addr() + 1)?)?;
        if is_gpumem_c(&own) { name(process::executable().ok()?) } else { Some(own) }
    };
    OWN.get_or_init(find).clone()
}

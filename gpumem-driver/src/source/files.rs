//! The program and the libraries that are loaded into it.

use std::sync::Arc;

use once_cell::sync::OnceCell;

use crate::sys::loader;

pub use crate::sys::loader::LoadedFile;

/// The files of the program and of libraries that contain return addresses, and where they are mapped. `None` where that is not known.
pub fn files_of(addresses: &[usize]) -> Vec<Option<Arc<LoadedFile>>> {
    loader::files_of(addresses)
}

/// The file name of the program or library that contains this crate; `None` where that is not known.
pub fn own_module() -> Option<String> {
    static OWN: OnceCell<Option<String>> = OnceCell::new();
    let find = || {
        let here = own_module as *const ();
        loader::file_of(here.addr() + 1)?.file_name().map(|name| name.to_string_lossy().into_owned())
    };
    OWN.get_or_init(find).clone()
}

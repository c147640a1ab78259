//! The program and the libraries that are loaded into it.

use std::path::PathBuf;

use once_cell::sync::OnceCell;

use crate::{
    model::is_gpumem_c,
    sys::{loader, process},
};

/// Returns the file name of the program or library that contains this crate. If that is the library for C programs, returns the name of the
/// program. `None` if it is not known.
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

//! Finding a library and making sure that it has what will be called.

use std::error::Error as _;

use libloading::Library;

use crate::error::{Error, Kind};

/// Loads the first of `names` that can be loaded, checks that it has every one of `symbols`, and keeps it loaded.
///
/// cudarc's loader searches by the same names, so what it finds later is what was checked here; it panics where a
/// library or a symbol is missing, which a tool that only measures must not.
pub(super) fn load(library: &'static str, names: &[&str], symbols: &[&str]) -> Result<(), Error> {
    let mut detail = String::new();
    for name in names {
        // SAFETY: loading runs the library's initialisers. The names are those of NVIDIA's driver, whose initialisers
        // have no preconditions; a library of that name put on the path by the user is as trusted as the user's own.
        match unsafe { Library::new(*name) } {
            Ok(loaded) => {
                let missing = symbols.iter().find(|symbol| {
                    // SAFETY: the symbol is only looked up, as an address that is never called or read here.
                    unsafe { loaded.get::<*const ()>(symbol.as_bytes()) }.is_err()
                });
                if let Some(symbol) = missing {
                    return Err(Kind::NoSymbol { library, symbol: (*symbol).to_owned() }.into());
                }
                // Kept for the life of the process: a driver library that is unloaded and loaded again starts over.
                std::mem::forget(loaded);
                return Ok(());
            }
            // The loader's own words are the source of the error.
            Err(error) => detail = error.source().map_or_else(|| error.to_string(), ToString::to_string),
        }
    }
    Err(Kind::NoLibrary { library, detail }.into())
}

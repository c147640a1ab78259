//! Puts the stand-in driver where a child process looks for NVIDIA's libraries.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fs, io};

use crate::patch::Image;
use crate::process::built;
use crate::standin::{Cupti, Library, Standin};

impl Standin {
    /// Puts the shared object into `folder` under the names of the libraries that this machine has. It is one file with two names, so that
    /// the loader loads it once and both libraries see the same GPUs. libcupti is a separate file, like NVIDIA's, which gpumem must find in
    /// its folder. Returns the variable that names its folder.
    pub(crate) fn install(&self, folder: &Path) -> io::Result<Option<(String, PathBuf)>> {
        let mut bytes = image().patched(&self.patches);
        for symbol in &self.hidden {
            hide(&mut bytes, symbol);
        }
        // Processes that use the driver are recognised by the names of the files that they have loaded.
        let object = folder.join("libcuda.so.standin");
        fs::write(&object, &bytes)?;
        for library in Library::ALL {
            // If a real driver is installed, the loader would find it under the name that is not used here.
            let names = [format!("{}.so.1", library.name()), format!("{}.so", library.name())];
            let names = &names[..if system_has(library) { 2 } else { 1 }];
            for name in names {
                let file = folder.join(name);
                if self.damaged.contains(&library) || self.missing.contains(&library) && system_has(library) {
                    fs::write(file, "no library")?;
                } else if !self.missing.contains(&library) {
                    symlink(&object, file)?;
                }
            }
        }
        let (place, name, variable) = match &self.cupti {
            Cupti::Missing => return Ok(None),
            Cupti::OnPath(name) => (folder.to_owned(), name, None),
            Cupti::Under { variable, folder: inner, name } => {
                let root = folder.join("elsewhere");
                (root.join(inner), name, Some((variable.clone(), root)))
            }
        };
        fs::create_dir_all(&place)?;
        spell(&mut bytes, SONAME, name);
        fs::write(place.join(name), bytes)?;
        Ok(variable)
    }
}

/// Returns the shared object, read once.
fn image() -> &'static Image {
    static IMAGE: OnceLock<Image> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let path = built(&format!("{}gpumem_standin{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX));
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        Image::new(bytes).unwrap_or_else(|error| panic!("cannot understand {}: {error}", path.display()))
    })
}

/// The `SONAME` of the shared object, which no program requests.
const SONAME: &str = "libstandi.so.0";

/// Returns whether the loader finds this library without our help.
fn system_has(library: Library) -> bool {
    let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let name = format!("{}.so", library.name());
    cache.windows(name.len()).any(|window| window == name.as_bytes())
}

/// Spells the symbol's name differently, so that no program finds it.
fn hide(object: &mut [u8], symbol: &str) {
    spell(object, symbol, &format!("{}?", &symbol[..symbol.len() - 1]));
}

/// Replaces a name that the loader reads, by one of the same length.
fn spell(object: &mut [u8], old: &str, new: &str) {
    assert_eq!(old.len(), new.len(), "{new} cannot take the place of {old}");
    let name = format!("\0{old}\0").into_bytes();
    // Only this part is searched: a search of the whole file takes a tenth of a second without optimisation.
    let names = image().names();
    let places: Vec<usize> = names.filter(|start| object[*start..].starts_with(&name)).collect();
    assert!(!places.is_empty(), "the stand-in driver has no {old}");
    for start in places {
        object[start + 1..start + name.len() - 1].copy_from_slice(new.as_bytes());
    }
}

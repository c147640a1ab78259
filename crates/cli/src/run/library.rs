//! The library that the driver loads into the program. The command contains it and unpacks it into the user's cache.

use std::{
    env, fs,
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use tempfile::Builder;

use crate::files;

/// The library that the build script has built. Empty on systems where gpumem cannot record programs. A constant would
/// be stored four times in the compiler's files of this crate.
static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libgpumem_inject.so"));

/// Unpacks the library and returns its path. Its content is the same as in this command.
pub(super) fn unpacked() -> io::Result<PathBuf> {
    if LIBRARY.is_empty() {
        return Err(io::Error::other("this command was built without it: it is for Linux only"));
    }
    let mut last = io::Error::other("there is no folder for it: set HOME or XDG_CACHE_HOME");
    let mut for_the_user = None;
    let is_root = rustix::process::geteuid().is_root();
    for folder in folders() {
        match unpack(&folder, LIBRARY) {
            // Root's programs often change to another user before they use the GPU.
            Ok(path) if is_root && !is_readable_for_all(&folder) => _ = for_the_user.get_or_insert(path),
            Ok(path) => return Ok(path),
            Err(error) => {
                let next = "set XDG_CACHE_HOME or TMPDIR to a folder of yours";
                last = io::Error::new(error.kind(), format!("`{}`: {error}: {next}", folder.display()));
            }
        }
    }
    for_the_user.ok_or(last)
}

/// Returns whether users other than the owner can reach the contents of this folder.
fn is_readable_for_all(folder: &Path) -> bool {
    let is_open = |part: &Path| part.metadata().is_ok_and(|known| known.mode() & 0o001 != 0);
    folder.canonicalize().is_ok_and(|folder| folder.ancestors().all(is_open))
}

/// Returns the user's cache, else a folder of the user in the temporary folder.
fn folders() -> impl Iterator<Item = PathBuf> {
    let named = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
    let temporary = env::temp_dir().join(format!("gpumem-library-{}", rustix::process::geteuid().as_raw()));
    cache.map(|cache| cache.join("gpumem")).into_iter().chain([temporary])
}

fn unpack(folder: &Path, library: &[u8]) -> io::Result<PathBuf> {
    let path = folder.join(format!("libgpumem_inject-{:08x}.so", hash(library)));
    unpack_as(&path, library)?;
    Ok(path)
}

/// Returns a checksum of a library. That is enough, because the content is compared before the library is used.
pub(super) fn hash(library: &[u8]) -> u32 {
    let mut sum = flate2::Crc::new();
    sum.update(library);
    sum.sum()
}

/// Writes a library that programs load, unless it exists already. No other user may be able to write to its folder.
pub(super) fn unpack_as(path: &Path, library: &[u8]) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::NotFound)?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    // The program runs code from this folder.
    let known = folder.symlink_metadata()?;
    if !known.is_dir() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "a link, which others may have put there"));
    }
    if known.uid() != rustix::process::geteuid().as_raw() || known.mode() & 0o022 != 0 {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "others may write to it"));
    }
    make_readable(folder, 0o755);
    if read(path).is_ok_and(|there| there == library) {
        make_readable(path, FILE_MODE);
        return Ok(());
    }
    // The file gets its name last, so that a program that starts in the meantime cannot load a part of it. A file that
    // a running program has loaded is never changed.
    let mut part = Builder::new().prefix("libgpumem").tempfile_in(folder)?;
    make_readable(part.path(), FILE_MODE);
    part.write_all(library)?;
    part.persist(path)?;
    // A program crashes if it loads an incomplete library.
    if read(path)? == library { Ok(()) } else { Err(io::Error::other("another process has changed the library")) }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    files::open_to_read(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Makes a path readable, because the program may change to another user before the driver loads the library. The umask
/// only affects new files.
fn make_readable(path: &Path, mode: u32) {
    if path.metadata().is_ok_and(|known| known.mode() & 0o777 != mode) {
        _ = fs::set_permissions(path, fs::Permissions::from_mode(mode));
    }
}

/// Only root may write to the library, because a program crashes if it loads an incomplete one.
const FILE_MODE: u32 = 0o555;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_users_can_read_the_library() {
        let temporary = tempfile::tempdir().unwrap();
        let above = temporary.path().join("above");
        let folder = above.join("gpumem");
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
        let path = unpack(&folder, b"the library").unwrap();
        assert_eq!((mode(&folder), mode(&path)), (0o755, 0o555));
        // Another gpumem version left the permissions like this.
        for path in [&folder, &path] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
        }
        assert_eq!(unpack(&folder, b"the library").unwrap(), path);
        assert_eq!((mode(&folder), mode(&path)), (0o755, 0o555));
        let link = above.join("link");
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        assert_eq!(unpack(&link, b"the library").unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        // The folders above it are not changed.
        assert_eq!((mode(&above), is_readable_for_all(&folder)), (0o700, false));
        fs::set_permissions(&above, fs::Permissions::from_mode(0o711)).unwrap();
        assert_eq!(is_readable_for_all(&folder), is_readable_for_all(&env::temp_dir()));
    }

    #[test]
    fn a_library_is_unpacked_once_and_repaired() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("gpumem");
        let path = unpack(&folder, b"the library").unwrap();
        let written = path.metadata().unwrap().modified().unwrap();
        assert_eq!(unpack(&folder, b"the library").unwrap(), path);
        assert_eq!(path.metadata().unwrap().modified().unwrap(), written);
        assert_ne!(unpack(&folder, b"another").unwrap(), path);
        // The file was changed.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(&path, b"something else").unwrap();
        assert_eq!(fs::read(unpack(&folder, b"the library").unwrap()).unwrap(), b"the library");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(unpack(&folder, b"the library").unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}

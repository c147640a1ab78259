//! Baseline files, which keep the peaks of tests (`GPUMEM_BASELINE`) and of recordings (`gpumem baseline`) from earlier runs in a
//! repository.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt::{self, Display},
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error as _, MapAccess, Visitor},
};

use crate::{
    error::{Error, Kind, Result},
    model::Bytes,
    regular_file,
    settings::size,
    sys::lock_file::LockFile,
};

/// The maximum wait for the lock. Writing takes milliseconds, so only a hung process holds the lock for this long.
const PATIENCE: Duration = Duration::from_secs(30);

/// The maximum size of a file that is read. Each peak is a line of about 100 bytes.
const LONGEST: u64 = 16 << 20;

/// The contents of a baseline file. They are sorted, so that a changed peak changes one line.
#[derive(Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    /// The peaks by name, for example by the name of a test.
    #[serde(deserialize_with = "one_line_each")]
    pub peaks: BTreeMap<String, Peak>,
}

/// Reads the peaks. Returns an error if a name has two lines, for example after a merge, because it is unclear which of the two to compare.
fn one_line_each<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<BTreeMap<String, Peak>, D::Error> {
    struct PeaksVisitor;
    impl<'de> Visitor<'de> for PeaksVisitor {
        type Value = BTreeMap<String, Peak>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object of names and peaks")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut lines: A) -> std::result::Result<Self::Value, A::Error> {
            let mut peaks = BTreeMap::new();
            while let Some((name, peak)) = lines.next_entry::<String, Peak>()? {
                if peaks.contains_key(&name) {
                    return Err(A::Error::custom(format_args!("`{name}` has two lines")));
                }
                peaks.insert(name, peak);
            }
            Ok(peaks)
        }
    }
    deserializer.deserialize_map(PeaksVisitor)
}

/// A peak. In the file it is a number of bytes, or a text such as `650 MiB` if it is a whole number of MiB.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(try_from = "Written")]
pub struct Peak(pub Bytes);

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Bytes(u64),
    Text(String),
}

impl TryFrom<Written> for Peak {
    type Error = String;

    fn try_from(written: Written) -> std::result::Result<Self, String> {
        match written {
            Written::Bytes(bytes) => Ok(Self(Bytes::new(bytes))),
            Written::Text(text) => size(&text).map(Self).map_err(|error| format!("`{text}` is not a size: {error}")),
        }
    }
}

impl Serialize for Peak {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        const MIB: u64 = 1 << 20;
        match self.0.get() {
            bytes if bytes > 0 && bytes % MIB == 0 => serializer.collect_str(&format_args!("{} MiB", bytes / MIB)),
            bytes => serializer.serialize_u64(bytes),
        }
    }
}

impl Baseline {
    /// Reads a baseline file. Returns `None` if the file does not exist.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is not a baseline.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let read = || {
            let mut text = Vec::new();
            // The file may grow while it is read.
            regular_file::open_to_read(path)?.take(LONGEST + 1).read_to_end(&mut text)?;
            if text.len() as u64 > LONGEST {
                return Err(io::Error::other(format!("it has more than {}", Bytes::new(LONGEST))));
            }
            Ok(text)
        };
        let other = |why: &dyn Display| {
            let detail = format!("it is not a baseline file ({why}); repair or remove it, and write it again");
            baseline_error(path, detail)
        };
        match read() {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|error| other(&error).because(error)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(other(&error).because(error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(baseline_error(path, format!("cannot read it: {error}")).because(error)),
        }
    }

    /// Changes a baseline file. Several threads and processes may change the same file at the same time: a lock file lets only one of them
    /// read and write at a time. A reader without the lock sees either the old file or the new one, never a part of it.
    ///
    /// # Errors
    /// Returns an error if the file cannot be locked, read or written, or if it is not a baseline. The file is then unchanged.
    pub fn update(path: &Path, change: impl FnOnce(&mut Self)) -> Result<()> {
        let failed =
            |doing: &str, error: io::Error| baseline_error(path, format!("cannot {doing}: {error}")).because(error);
        // The file at the end of symbolic links is replaced, and the links stay.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        // A lock on the file itself would end when the file is replaced.
        let _lock = LockFile::wait(&with_ending(&target, ".lock"), PATIENCE, || {})
            .map_err(|error| failed("lock it", error))?;
        let old = Self::read(path)?;
        let is_new = old.is_none();
        let mut baseline = old.unwrap_or_default();
        let before = baseline.peaks.clone();
        change(&mut baseline);
        if !is_new && baseline.peaks == before {
            return Ok(());
        }
        let mut text = serde_json::to_string_pretty(&baseline)
            .map_err(|error| baseline_error(path, error.to_string()).because(error))?;
        text.push('\n');
        let new = with_ending(&target, ".new");
        let replace = || {
            fs::write(&new, text)?;
            match fs::metadata(&target) {
                Ok(old) => fs::set_permissions(&new, old.permissions())?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            fs::rename(&new, &target)
        };
        replace().map_err(|error| {
            let _ = fs::remove_file(&new);
            failed("write it", error)
        })
    }
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(ending);
    name.into()
}

fn baseline_error(path: &Path, detail: String) -> Error {
    Kind::BadBaseline { file: path.display().to_string(), detail }.into()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use tempfile::tempdir;

    use super::*;

    fn write(path: &Path, name: &str, peak: u64) -> Result<()> {
        Baseline::update(path, |baseline| _ = baseline.peaks.insert(name.to_owned(), Peak(Bytes::new(peak))))
    }

    fn read(path: &Path, name: &str) -> Result<Option<u64>> {
        Ok(Baseline::read(path)?.and_then(|baseline| baseline.peaks.get(name).map(|peak| peak.0.get())))
    }

    #[test]
    fn concurrent_tests_write_one_file() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("baseline.json");
        thread::scope(|threads| {
            for number in 0..8_u64 {
                let path = &path;
                threads.spawn(move || {
                    for round in 0..20 {
                        write(path, &format!("test {number}"), round).unwrap();
                        assert_eq!(read(path, &format!("test {number}")), Ok(Some(round)));
                    }
                });
            }
        });
        assert_eq!(Baseline::read(&path).unwrap().unwrap().peaks.len(), 8);
        let names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["baseline.json"], "no lock stays behind");
    }

    #[test]
    fn whole_mebibytes_are_written_in_words() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("baseline.json");
        write(&path, "exact", 1).unwrap();
        write(&path, "none", 0).unwrap();
        write(&path, "whole", 650 << 20).unwrap();
        let text = "{\n  \"peaks\": {\n    \"exact\": 1,\n    \"none\": 0,\n    \"whole\": \"650 MiB\"\n  }\n}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert_eq!(read(&path, "whole"), Ok(Some(650 << 20)));
    }

    #[test]
    #[cfg(unix)]
    fn a_link_stays_one_and_the_file_keeps_its_mode() {
        use std::os::unix::fs::{PermissionsExt, symlink};

        let folder = tempdir().unwrap();
        let [file, link, outer] = ["file.json", "link.json", "outer.json"].map(|name| folder.path().join(name));
        symlink("file.json", &link).unwrap();
        symlink(&link, &outer).unwrap();
        write(&file, "a", 1).unwrap();
        for mode in [0o600, 0o664, 0o640] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            write(&outer, "a", mode.into()).unwrap();
            assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, mode);
            assert_eq!((read(&outer, "a"), read(&file, "a")), (Ok(Some(mode.into())), Ok(Some(mode.into()))));
        }
        for link in [&link, &outer] {
            assert!(fs::symlink_metadata(link).unwrap().is_symlink());
        }
    }

    #[test]
    fn an_error_names_what_is_wrong_with_the_file() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("baseline.json");
        assert_eq!(read(&path, "a"), Ok(None));
        for text in [
            "",
            "[]",
            "{\"peaks\": {\"a\": \"much\"}}",
            "{\"peaks\": {\"a\": \"5\"}}",
            "{\"peaks\": {\"a\": -1}}",
            "{\"peaks\": {}, \"other\": 1}",
            "{\"peaks\": {\"a\": 1, \"a\": \"2 MiB\"}}",
            "{\"peaks\": {\"a\": 1",
        ] {
            fs::write(&path, text).unwrap();
            for error in [read(&path, "a").unwrap_err(), write(&path, "a", 1).unwrap_err()] {
                let error = error.to_string();
                assert!(error.contains("it is not a baseline file") && error.contains("baseline.json"), "{error}");
            }
            assert_eq!(fs::read_to_string(&path).unwrap(), text, "left as it was");
        }
        // If the disk is full, the file is unchanged, and no temporary file is left.
        #[cfg(target_os = "linux")]
        {
            fs::write(&path, "{\"peaks\": {}}").unwrap();
            std::os::unix::fs::symlink("/dev/full", with_ending(&path, ".new")).unwrap();
            let full = write(&path, "a", 1).unwrap_err().to_string();
            assert!(full.contains("cannot write it: No space left on device"), "{full}");
            assert_eq!(fs::read_to_string(&path).unwrap(), "{\"peaks\": {}}");
            assert!(fs::symlink_metadata(with_ending(&path, ".new")).is_err(), "it is removed");
        }
        let nowhere = write(&folder.path().join("no/such/folder.json"), "a", 1).unwrap_err().to_string();
        assert!(nowhere.contains("lock file"), "{nowhere}");
    }
}

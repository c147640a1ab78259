//! Determines how much memory the process may still get under the limit of its control group (cgroup), as in containers.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Returns how many bytes the group of this process, and the groups around it, may still get. Returns `None` if there is no limit, or if it
/// is not known.
///
/// Pages of files count as free, because the kernel releases them before it kills a process.
pub fn memory_left() -> Option<u64> {
    left(Path::new("/sys/fs/cgroup"), &fs::read_to_string("/proc/self/cgroup").ok()?)
}

/// The names of the files with the limit and the memory in use, and of the fields with the pages of files, in version 2 and version 1.
const FILES: [[&str; 4]; 2] = [
    ["memory.max", "memory.current", "inactive_file", "active_file"],
    ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"],
];

/// Returns the bytes left. `groups` is the kernel's text, with a line `number:controllers:path` for each hierarchy.
fn left(root: &Path, groups: &str) -> Option<u64> {
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let (root, files) = match controllers {
            "" => (root.to_owned(), FILES[0]),
            _ if controllers.split(',').any(|controller| controller == "memory") => (root.join("memory"), FILES[1]),
            _ => return None,
        };
        let group = root.join(path.trim_start_matches('/'));
        // In a container, the folders of outer groups do not exist.
        let groups = group.ancestors().take_while(|folder| folder.starts_with(&root)).map(PathBuf::from);
        groups.filter_map(|folder| left_in(&folder, files)).min()
    };
    groups.lines().filter_map(of_line).min()
}

fn left_in(folder: &Path, [limit, used, inactive, active]: [&str; 4]) -> Option<u64> {
    let number = |file: &str| fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
    let (limit, used) = (number(limit)?, number(used)?);
    let statistics = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let field = |name: &str| {
        let value = statistics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.parse::<u64>().ok()).unwrap_or(0)
    };
    let free = field(inactive).saturating_add(field(active));
    Some(limit.saturating_sub(used.saturating_sub(free)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_group_counts_and_pages_of_files_are_free() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let write = |folder: &str, limit: &str, used: &str, statistics: &str, files: [&str; 4]| {
            let folder = root.join(folder);
            fs::create_dir_all(&folder).unwrap();
            for (file, text) in [(files[0], limit), (files[1], used), ("memory.stat", statistics)] {
                fs::write(folder.join(file), text).unwrap();
            }
        };
        let [new, old] = FILES;
        write("a", "1000\n", "900\n", "anon 300\ninactive_file 400\nactive_file 100\n", new);
        write("a/b", "max\n", "800\n", "", new);
        assert_eq!(left(root, "0::/a/b\n"), Some(600));
        write("a/b", "700\n", "650\n", "inactive_file 10\n", new);
        assert_eq!(left(root, "0::/a/b\n"), Some(60));
        assert_eq!(left(root, "0::/\n"), None);
        // The path is the one outside the container.
        write("memory", "500", "450", "inactive_file 1\ntotal_inactive_file 20\ntotal_active_file 3\n", old);
        let groups = "5:devices:/x\n4:cpu,memory:/docker/123\n0::/a\n";
        assert_eq!(left(root, groups), Some(73));
        assert_eq!(left(root, "no group"), None);
    }
}

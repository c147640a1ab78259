//! Merges NVML's lists of the processes on a device, so that each process has one entry.

use std::{collections::BTreeMap, fs};

use crate::{
    error::Result,
    model::{Bytes, GpuProcess, ProcessKind},
    sys::nvml::{self, ListedProcess},
};

/// Returns the processes on a device, by pid.
pub(super) fn on(handle: &nvml::Handle, ordinal: u32) -> Result<Vec<GpuProcess>> {
    let mut processes = joined(&handle.processes(ordinal)?);
    for process in &mut processes {
        process.name = nvml::process_name(process.pid).or_else(|| short_name(process.pid));
    }
    Ok(processes)
}

/// Returns the operating system's name of a process.
fn short_name(pid: u32) -> Option<String> {
    let name = fs::read(format!("/proc/{pid}/comm")).ok()?;
    Some(String::from_utf8_lossy(&name).trim_end().to_owned()).filter(|name| !name.is_empty())
}

/// Merges the lists. A process may be in several lists (one for compute, one for graphics), each time with all its memory. Within a list it
/// has one entry for each MIG slice, with its memory on that slice.
fn joined(listed: &[ListedProcess]) -> Vec<GpuProcess> {
    let mut by_slice: BTreeMap<_, (Option<u64>, bool, bool)> = BTreeMap::new();
    for process in listed {
        let (used, compute, graphics) = by_slice.entry((process.pid, process.slice)).or_default();
        *used = (*used).max(process.used);
        *compute |= !process.graphics;
        *graphics |= process.graphics;
    }
    let mut processes: Vec<GpuProcess> = Vec::new();
    for ((pid, _), (used, compute, graphics)) in by_slice {
        let kind = match (compute, graphics) {
            (true, false) => ProcessKind::Compute,
            (false, _) => ProcessKind::Graphics,
            (true, true) => ProcessKind::Both,
        };
        let used = used.map(Bytes::new);
        if let Some(last) = processes.last_mut().filter(|last| last.pid == pid) {
            // If one part is not known, the sum is not known either.
            last.used = last.used.zip(used).map(|(a, b)| a + b);
            last.kind = if last.kind == kind { kind } else { ProcessKind::Both };
        } else {
            let mut process = GpuProcess::new(pid, kind);
            process.used = used;
            processes.push(process);
        }
    }
    processes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_joined_by_pid() {
        /// The type (`G` or `C`), the pid, the used memory if it is known, and the slice.
        type ProcessEntry = (char, u32, Option<u64>, u32);
        let cases: &[(&[ProcessEntry], &str)] = &[
            (&[], ""),
            (&[('C', 7, Some(5), 0), ('C', 3, None, 0)], "3 C None, 7 C Some(5)"),
            // The process is in two lists. MPS has a compute list.
            (&[('C', 7, Some(5), 0), ('G', 7, Some(5), 0)], "7 C+G Some(5)"),
            (&[('C', 7, Some(5), 0), ('C', 7, Some(5), 0)], "7 C Some(5)"),
            // One of the lists does not contain the memory.
            (&[('C', 7, None, 0), ('G', 7, Some(5), 0)], "7 C+G Some(5)"),
            (&[('G', 7, Some(0), 0)], "7 G Some(0)"),
            // The process runs on two slices.
            (&[('C', 7, Some(5), 1), ('C', 7, Some(6), 2)], "7 C Some(11)"),
            (&[('C', 7, Some(5), 1), ('C', 7, None, 2)], "7 C None"),
        ];
        for (rows, expected) in cases {
            let listed = rows.iter().map(|(kind, pid, used, slice)| ListedProcess {
                pid: *pid,
                used: *used,
                graphics: *kind == 'G',
                slice: (Some(*slice), None),
            });
            let entries = joined(&listed.collect::<Vec<_>>())
                .into_iter()
                .map(|process| format!("{} {} {:?}", process.pid, process.kind, process.used.map(Bytes::get)));
            assert_eq!(entries.collect::<Vec<_>>().join(", "), *expected, "{rows:?}");
        }
    }

    #[test]
    fn the_system_has_a_name_for_a_running_process() {
        assert!(short_name(std::process::id()).is_some_and(|name| !name.is_empty() && !name.ends_with('\n')));
        assert_eq!(short_name(u32::MAX), None);
    }
}

//! The memory of NCCL's communicators: the blocks that their calls allocated, and the memory that the driver took during these calls.

use std::collections::BTreeMap;

use gpumem_core::{derive::Names, model::Bytes};
use serde::Serialize;

use crate::history::{History, OriginSum, ProcessMemory};

/// At most this many communicators are named in a line.
const MOST: usize = 4;

/// The memory of a communicator on one device. The field names are those in JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Communicator {
    /// Communicators are numbered in the order in which the process created them.
    pub(crate) number: u32,
    /// The number of its ranks. `None` if its creation was not recorded.
    pub(crate) ranks: Option<u32>,
    /// The bytes of its blocks at the peak of allocations.
    pub(crate) allocated_bytes: i64,
    /// The bytes that the driver took during its calls, at the peak of the process: modules, local memory and streams.
    pub(crate) driver_bytes: i64,
}

/// Returns the communicators with memory on a device, the largest first.
pub(crate) fn communicators(
    history: &History,
    held: &[OriginSum<'_>],
    process: Option<&ProcessMemory>,
) -> Vec<Communicator> {
    let mut all: BTreeMap<u32, Communicator> = BTreeMap::new();
    let mut of = |path: &[String], allocated: i64, driver: i64| {
        let Some(number) = path.iter().find_map(|scope| number_in(scope)) else { return };
        let known = all.entry(number).or_insert(Communicator { number, ..Communicator::default() });
        (known.allocated_bytes, known.driver_bytes) = (known.allocated_bytes + allocated, known.driver_bytes + driver);
    };
    for sum in held.iter().filter(|sum| sum.origin.kind.is_on_device()) {
        of(&sum.origin.path, sum.bytes, 0);
    }
    for sum in process.iter().flat_map(|process| &process.taken_by_driver) {
        of(&sum.scope, 0, sum.bytes);
    }
    if !all.is_empty() {
        for mark in &history.marks {
            let name = history.definitions().callsite(mark.callsite).to_string();
            if let Some((number, ranks)) = created_in(&name) {
                all.entry(number).and_modify(|known| known.ranks = Some(ranks));
            }
        }
    }
    let mut all: Vec<_> = all.into_values().collect();
    all.sort_by_key(|of| (-(of.allocated_bytes + of.driver_bytes), of.number));
    all
}

/// Returns the communicator of the scope `NCCL:ncclAllReduce (communicator 1)`.
fn number_in(scope: &str) -> Option<u32> {
    scope.strip_prefix("NCCL:")?.strip_suffix(')')?.rsplit_once(" (communicator ")?.1.parse().ok()
}

/// Returns the communicator of the mark `NCCL:communicator 1 has 8 ranks`, and the number of its ranks.
fn created_in(mark: &str) -> Option<(u32, u32)> {
    let (number, ranks) = mark.strip_prefix("NCCL:communicator ")?.strip_suffix(" ranks")?.split_once(" has ")?;
    Some((number.parse().ok()?, ranks.parse().ok()?))
}

/// Returns a line such as `communicator 1 (8 ranks): blocks 16 MiB, driver 352 MiB; communicator 2 (2 ranks): blocks 16 MiB`.
pub(crate) fn in_words(communicators: &[Communicator]) -> String {
    let one = |of: &Communicator| {
        let ranks = of.ranks.map(|ranks| format!(" ({ranks} ranks)")).unwrap_or_default();
        let parts = [("blocks", of.allocated_bytes), ("driver", of.driver_bytes)].into_iter();
        let parts = parts.filter(|(_, bytes)| *bytes != 0);
        let parts: Vec<_> = parts.map(|(name, bytes)| format!("{name} {}", Bytes::new(bytes.unsigned_abs()))).collect();
        format!("communicator {}{ranks}: {}", of.number, parts.join(", "))
    };
    let mut words: Vec<_> = communicators.iter().take(MOST).map(one).collect();
    if communicators.len() > MOST {
        words.push(format!("{} more", communicators.len() - MOST));
    }
    words.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_scopes_and_marks() {
        assert_eq!(number_in("NCCL:ncclAllReduce (communicator 12)"), Some(12));
        for other in ["ncclAllReduce (communicator 1)", "NCCL:ncclAllReduce", "NCCL:x (communicator y)", "forward"] {
            assert_eq!(number_in(other), None, "{other}");
        }
        assert_eq!(created_in("NCCL:communicator 3 has 16 ranks"), Some((3, 16)));
        assert_eq!(created_in("NCCL:communicator 3"), None);
    }

    #[test]
    fn only_the_largest_are_named() {
        let all: Vec<_> = (1..=6)
            .map(|number| Communicator {
                number,
                ranks: (number > 1).then_some(2),
                allocated_bytes: if number == 2 { 0 } else { 16 << 20 },
                driver_bytes: if number == 3 { 0 } else { 2 << 20 },
            })
            .collect();
        assert_eq!(
            in_words(&all),
            "communicator 1: blocks 16 MiB, driver 2 MiB; communicator 2 (2 ranks): driver 2 MiB; communicator 3 (2 ranks): \
             blocks 16 MiB; communicator 4 (2 ranks): blocks 16 MiB, driver 2 MiB; 2 more"
        );
    }
}

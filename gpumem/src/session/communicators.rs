//! The communicators of NCCL, which have numbers in the order of their creation.
//!
//! NCCL marks each of its calls with an NVTX range of the domain `NCCL`. The payload of a range starts with the id of the communicator, which
//! differs in each run. A range that creates a communicator has its payload only at its end. The payloads come from
//! `nvtx_payload_schemas.h` of NCCL.

use std::{
    cell::Cell,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use crate::nvtx::Payload;

/// At most this many communicators are stored.
const MOST: usize = 1 << 12;

/// The number of the latest communicator. The first one is 1.
static LATEST: AtomicU32 = AtomicU32::new(0);

/// The ids of the communicators and their numbers, in the order of their creation.
static KNOWN: Mutex<Vec<(u64, u32)>> = Mutex::new(Vec::new());

/// The communicators of the calls since the thread started a group. NCCL does the work of a group at its end.
#[derive(Clone, Copy)]
enum Group {
    Empty,
    Of(u32),
    Mixed,
}

thread_local! {
    static GROUP: Cell<Group> = const { Cell::new(Group::Empty) };
}

/// A call that creates a communicator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Creation {
    pub(super) number: u32,
    /// Where the payload contains the number of ranks.
    ranks_at: usize,
}

impl Creation {
    /// Returns the creation of a communicator, with a new number, if the range has the name of such a call.
    pub(super) fn of(range: &str) -> Option<Self> {
        let call = range.strip_prefix("NCCL:ncclComm")?;
        let ranks_at = match call {
            // The payload has the ids of the new and of the old communicator first.
            "Split" => 16,
            "Shrink" => 8,
            _ if call.starts_with("Init") => 8,
            _ => return None,
        };
        Some(Self { number: LATEST.fetch_add(1, Relaxed) + 1, ranks_at })
    }

    /// Stores the communicator. Returns the text of a mark with the number of its ranks.
    pub(super) fn created(self, payload: Payload) -> Option<String> {
        let id = id_in(payload);
        let ranks = i32::from_ne_bytes(*payload[self.ranks_at..].first_chunk()?);
        if id == 0 || ranks <= 0 {
            return None;
        }
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        // NCCL may give the id of a communicator that was destroyed to another one.
        known.retain(|(known, _)| *known != id);
        if known.len() < MOST {
            known.push((id, self.number));
        }
        Some(format!("NCCL:communicator {} has {ranks} ranks", self.number))
    }
}

/// Returns the communicator of a call that marks itself with a range of this name.
pub(super) fn of_call(range: &str, payload: Option<Payload>) -> Option<u32> {
    match range.strip_prefix("NCCL:")? {
        "ncclGroupStart" => {
            GROUP.set(Group::Empty);
            return None;
        }
        "ncclGroupEnd" => match GROUP.replace(Group::Empty) {
            Group::Of(number) => return Some(number),
            Group::Empty | Group::Mixed => return None,
        },
        _ => {}
    }
    let id = payload.map(id_in)?;
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, number) = *known.iter().find(|(known, _)| *known == id)?;
    GROUP.set(match GROUP.get() {
        Group::Empty => Group::Of(number),
        Group::Of(other) if other == number => Group::Of(number),
        Group::Of(_) | Group::Mixed => Group::Mixed,
    });
    Some(number)
}

/// Returns the name of the scope of a call.
pub(super) fn name_of_call(range: &str, number: u32) -> String {
    format!("{range} (communicator {number})")
}

fn id_in(payload: Payload) -> u64 {
    payload.first_chunk().map_or(0, |id| u64::from_ne_bytes(*id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(id: u64, parent: Option<u64>, ranks: i32) -> Payload {
        let mut payload = Payload::default();
        let numbers =
            [id.to_ne_bytes().to_vec(), parent.map(u64::to_ne_bytes).into_iter().flatten().collect()].concat();
        let all = [numbers, ranks.to_ne_bytes().to_vec()].concat();
        payload[..all.len()].copy_from_slice(&all);
        payload
    }

    #[test]
    fn communicators_have_numbers() {
        let first = Creation::of("NCCL:ncclCommInitRankConfig").expect("it creates one");
        let second = Creation::of("NCCL:ncclCommSplit").expect("it creates one");
        let [one, two] = [first, second].map(|creation| creation.number);
        assert_eq!(two, one + 1);
        assert_eq!(first.created(payload(77, None, 8)).unwrap(), format!("NCCL:communicator {one} has 8 ranks"));
        assert_eq!(second.created(payload(78, Some(77), 2)).unwrap(), format!("NCCL:communicator {two} has 2 ranks"));
        assert_eq!(of_call("NCCL:ncclAllReduce", Some(payload(77, None, 0))), Some(one));
        assert_eq!(of_call("NCCL:ncclAllReduce", Some(payload(78, None, 0))), Some(two));
        assert_eq!(name_of_call("NCCL:ncclAllReduce", 2), "NCCL:ncclAllReduce (communicator 2)");
        let call = |name: &str, id| of_call(&format!("NCCL:{name}"), Some(payload(id, None, 0)));
        for (ids, of_end) in [(&[77, 77][..], Some(one)), (&[77, 78], None), (&[], None)] {
            assert_eq!(call("ncclGroupStart", 0), None);
            assert!(ids.iter().all(|id| call("ncclSend", *id).is_some()));
            assert_eq!(call("ncclGroupEnd", 0), of_end, "{ids:?}");
        }
        // A later communicator with the same id.
        let third = Creation::of("NCCL:ncclCommShrink").expect("it creates one");
        assert!(third.created(payload(77, None, 4)).is_some());
        assert_eq!(of_call("NCCL:ncclSend", Some(payload(77, None, 0))), Some(third.number));
    }

    #[test]
    fn other_ranges_have_no_communicator() {
        for range in ["NCCL:ncclCommDestroy", "ncclCommInitRank", "NCCL:ncclAllReduce"] {
            assert!(Creation::of(range).is_none(), "{range}");
        }
        assert_eq!(of_call("forward", Some(payload(77, None, 0))), None);
        assert_eq!(of_call("NCCL:ncclAllReduce", None), None);
        assert_eq!(of_call("NCCL:ncclAllReduce", Some(payload(123, None, 0))), None);
        let creation = Creation::of("NCCL:ncclCommInitAll").expect("it creates one");
        assert_eq!(creation.created(Payload::default()), None);
        assert_eq!(creation.created(payload(5, None, -1)), None);
    }
}

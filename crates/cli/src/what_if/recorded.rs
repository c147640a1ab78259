//! The data of a recording that is replayed.

use gpumem_core::{model::Bytes, report::counted};
use gpumem_driver::settings::CONTEXT;
use serde::Serialize;

/// The data of the replayed recording. The field names are those in JSON.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ReplayedRecording {
    pub(crate) device: u32,
    /// The number of devices that PyTorch used. The one with the most reserved memory is replayed.
    pub(crate) devices: usize,
    /// The most driver memory that PyTorch's allocator held in the recording.
    pub(crate) reserved_bytes: u64,
    /// The most driver memory in a replay with the same settings. `None` if no card has that much.
    pub(crate) replayed_bytes: Option<u64>,
    /// True if the recording contains the settings of the allocator. If not, the replay uses PyTorch's defaults.
    pub(crate) has_settings: bool,
    /// The memory of the allocator when the history starts, if that is after its first request.
    pub(crate) older_bytes: u64,
    /// The number of times that the program emptied its cache. Each replay empties it at the same requests.
    pub(crate) emptied: u64,
    /// The number of rejected requests whose memory the program never got. Each replay includes them.
    #[serde(rename = "refused")]
    pub(crate) rejected: u64,
    /// The other driver memory of the process at its peak.
    pub(crate) others_bytes: u64,
}

impl ReplayedRecording {
    /// Returns the title of the table.
    pub(super) fn title(&self) -> String {
        let of = if self.devices > 1 {
            format!(" on GPU {}, the busiest of {}", self.device, self.devices)
        } else {
            String::new()
        };
        format!("Modelled, not measured: PyTorch's recorded requests{of}, with other settings of its allocator.")
    }

    /// Returns whether the replay with the recorded settings reserves what the program reserved.
    pub(super) fn is_exact(&self) -> bool {
        self.replayed_bytes == Some(self.reserved_bytes)
    }

    /// Returns sentences on how far the rows can be trusted.
    pub(super) fn notes(&self) -> Vec<String> {
        let bytes = Bytes::new;
        let mut notes = Vec::new();
        let recorded = bytes(self.reserved_bytes);
        notes.push(match self.replayed_bytes {
            Some(_) if self.is_exact() => {
                format!("The replay reserves exactly what the recorded program reserved: {recorded}.")
            }
            replayed => {
                let replayed = replayed.map_or_else(|| "too much".to_owned(), |replayed| bytes(replayed).to_string());
                format!("The replay does not match the recording: it reserves {replayed}, the recorded program {recorded}. The other rows may be as wrong.")
            }
        });
        if !self.has_settings {
            notes.push("The recording does not contain PyTorch's settings: the replay uses the defaults.".to_owned());
        }
        if self.older_bytes > 0 {
            notes.push(format!(
                "The history starts later than the program. Each row starts with the {} that were reserved then.",
                bytes(self.older_bytes)
            ));
        }
        if self.emptied > 0 {
            let times = counted(self.emptied, "time", "times");
            notes.push(format!("The cache was emptied {times} in the recording, and each row does the same."));
        }
        if self.rejected > 0 {
            let requests = counted(self.rejected, "request", "requests");
            notes.push(format!(
                "The program never obtained {requests} that PyTorch rejected. Each row includes the requested memory."
            ));
        }
        notes.push(
            "No rows: garbage_collection_threshold, which needs a program that limits its memory, and cudaMallocAsync."
                .to_owned(),
        );
        let others = match self.others_bytes {
            0 => ", and nothing for other libraries, such as cuBLAS: the file has none".to_owned(),
            others => format!(" and {} for other libraries", bytes(others)),
        };
        notes.push(format!("The size of a GPU is all of its memory, including {CONTEXT} for the context{others}."));
        notes
    }
}

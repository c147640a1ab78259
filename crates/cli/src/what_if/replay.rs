//! Finds out what other settings of PyTorch's allocator would need, from the requests in a recording and a model of the
//! allocator.

use gpumem_core::model::Bytes;
use gpumem_driver::settings::CONTEXT;
use gpumem_estimate::replay::{Outcome, Request, replay};
use gpumem_recording::AllocatorSettings;

use super::{
    answer::{ALLOCATOR, Answer, AnswerRow, By, SETTINGS},
    requests::Requests,
    search::{in_parallel, smallest},
};
use crate::{failure::Failure, history::History};

/// Returns the settings of a row. `None` if there is no such row: PyTorch collects garbage only if the program limits
/// its memory (`malloc`, `allowed_memory_maximum`), and the model does not include `cudaMallocAsync`.
fn settings_of(setting: &str) -> Option<AllocatorSettings> {
    let plain = AllocatorSettings::default();
    Some(match setting.split_once(':')? {
        ("expandable_segments", "True") => AllocatorSettings { is_expandable: true, ..plain },
        ("max_split_size_mb", size) => AllocatorSettings { max_split: size.parse::<u64>().ok()? << 20, ..plain },
        ("roundup_power2_divisions", parts) => AllocatorSettings { divisions: vec![parts.parse().ok()?], ..plain },
        _ => return None,
    })
}

/// Replays a recording with each setting, on a card.
pub(crate) fn ask(history: &History, card: Bytes, jobs: usize) -> Result<Answer, Failure> {
    let cannot = |cause: &str, next| {
        let what = format!("`{}` cannot be replayed", history.path.display());
        Failure::new(what, cause, next)
    };
    let again = "record the program with `gpumem run --torch`";
    let tensors = history.tensors.as_ref().ok_or_else(|| cannot("it has no PyTorch requests", again))?;
    let all = tensors.devices.iter().map(|device| (device, Requests::of(device)));
    let busiest = all.max_by_key(|(_, requests)| requests.recorded.reserved_bytes);
    let (device, Requests { requests, mut recorded }) =
        busiest
            .filter(|(_, requests)| !requests.requests.is_empty())
            .ok_or_else(|| cannot(tensors.missing.as_deref().unwrap_or("it has no PyTorch requests"), again))?;
    let own = tensors.settings.clone().unwrap_or_default();
    if own.is_expandable && recorded.older_bytes > 0 {
        let cause = "its history was cut, and does not show the layout of its expandable segments at that time";
        return Err(cannot(cause, "record a shorter run"));
    }
    recorded.devices = tensors.devices.len();
    recorded.has_settings = tensors.settings.is_some();
    let used = history.devices.iter().find(|used| used.device == device.about.device);
    recorded.others_bytes = used.map_or(0, |used| used.peak).saturating_sub(recorded.reserved_bytes);
    let is_rejected = |request: &Request| matches!(request, Request::Rejected(..));
    let obtained: Vec<_> = requests.iter().filter(|request| !is_rejected(request)).cloned().collect();
    recorded.replayed_bytes = replay(&obtained, &own, u64::MAX).map(|outcome| outcome.reserved);
    let mut rows = vec![(String::new(), own)];
    if rows[0].1 != AllocatorSettings::default() {
        rows.push((format!("{ALLOCATOR}="), AllocatorSettings::default()));
    }
    let known = SETTINGS.iter().filter_map(|setting| Some((format!("{ALLOCATOR}={setting}"), settings_of(setting)?)));
    rows.extend(known);
    let fixed = recorded.others_bytes + CONTEXT.get();
    let limit = card.get().saturating_sub(fixed);
    let rows =
        in_parallel(jobs, &rows, |(environment, settings)| Ok(row(environment, &requests, settings, limit, fixed)))?;
    Ok(Answer::of(rows, By::Replay(recorded)))
}

/// Returns what the requests need with one setting. `limit` is the part of the card's memory that PyTorch may use, and
/// `fixed` is the rest.
fn row(environment: &str, requests: &[Request], settings: &AllocatorSettings, limit: u64, fixed: u64) -> AnswerRow {
    let mut row = AnswerRow { environment: environment.to_owned(), ..AnswerRow::default() };
    let Some(Outcome { reserved, .. }) = replay(requests, settings, u64::MAX) else {
        row.failed = Some("the requests exceed the memory of any GPU".to_owned());
        return row;
    };
    let fits = |limit: u64| Ok::<_, Failure>(replay(requests, settings, limit).is_some());
    // The sizes of segments are multiples of 2 MiB.
    let needs = smallest(0, reserved, |_| 2 << 20, fits).unwrap_or(reserved);
    row.smallest_card_bytes = Some(needs.next_multiple_of(2 << 20).min(reserved) + fixed);
    if let Some(outcome) = replay(requests, settings, limit) {
        row.most_bytes = Some(outcome.reserved);
        row.unused_bytes = Some(outcome.unused);
        row.retries = Some(outcome.retries);
    } else {
        row.rejected = 1;
        row.failed = Some("out of memory".to_owned());
    }
    row
}

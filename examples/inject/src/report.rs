//! What the process did with GPU memory, for people and for programs.

use std::{
    collections::BTreeMap,
    env,
    fmt::{self, Display},
    process,
    time::Duration,
};

use gpumem::{
    Bytes,
    intercept::Status,
    report::{AllocStats, LiveBlock, MemoryStats},
};
use serde_json::{Value, json};

/// What the process did, on each device on which it allocated.
pub(crate) struct Report {
    command: Vec<String>,
    lasted: Duration,
    /// Why allocations were not intercepted, if they were not.
    error: Option<String>,
    status: Status,
    devices: Vec<Device>,
}

struct Device {
    ordinal: u32,
    name: Option<String>,
    /// In use now, and at most: what gpumem counted by itself, whatever the driver still says.
    used: Bytes,
    peak: Bytes,
    allocations: u64,
    /// `None` where the driver does not answer any more.
    stats: Option<MemoryStats>,
    /// What is live, by the library that asked for it and by its kind, the largest first.
    live: Vec<Live>,
}

struct Live {
    library: Option<String>,
    kind: &'static str,
    bytes: Bytes,
    blocks: u64,
}

impl Report {
    /// `None` where there is nothing to report: the process allocated no GPU memory.
    pub(crate) fn of(subscribed: &gpumem::Result<()>, lasted: Duration) -> Option<Self> {
        let error = subscribed.as_ref().err().map(ToString::to_string);
        // The driver may be shut down already, so the summary does not call it.
        let summary = gpumem::summary();
        let all = summary.scopes.iter().filter(|scope| scope.path.is_empty() && scope.allocations > 0);
        let devices: Vec<_> = all
            .map(|scope| Device {
                ordinal: scope.device,
                name: gpumem::device::name(scope.device).ok(),
                used: scope.used,
                peak: scope.peak,
                allocations: scope.allocations,
                stats: gpumem::torch::memory_stats(scope.device).ok(),
                live: Vec::new(),
            })
            .collect();
        if devices.is_empty() && error.is_none() {
            return None;
        }
        let blocks = gpumem::torch::memory_snapshot().unwrap_or_default();
        let devices = devices.into_iter().map(|device| Device { live: by_library(&blocks, device.ordinal), ..device });
        Some(Self {
            command: env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
            lasted,
            error,
            status: gpumem::status(),
            devices: devices.collect(),
        })
    }

    pub(crate) fn json(&self) -> Value {
        let Status { intercepted_by, events, untracked, lost, .. } = &self.status;
        json!({
            "process": process::id(),
            "command": self.command,
            "seconds": self.lasted.as_secs_f64(),
            "error": self.error,
            "intercepted_by": intercepted_by,
            "events": events,
            "untracked_frees": untracked,
            "lost_events": lost,
            "devices": self.devices.iter().map(Device::json).collect::<Vec<_>>(),
        })
    }
}

fn by_library(blocks: &[LiveBlock], device: u32) -> Vec<Live> {
    let mut sums: BTreeMap<(Option<&str>, &'static str), (Bytes, u64)> = BTreeMap::new();
    for block in blocks.iter().filter(|block| block.device == device) {
        let (bytes, blocks) = sums.entry((block.library.as_deref(), block.kind.name())).or_default();
        *bytes = *bytes + block.bytes;
        *blocks += 1;
    }
    let live = |((library, kind), (bytes, blocks)): ((Option<&str>, _), _)| {
        let library = library.map(str::to_owned);
        Live { library, kind, bytes, blocks }
    };
    let mut live: Vec<_> = sums.into_iter().map(live).collect();
    live.sort_by_key(|live| std::cmp::Reverse(live.bytes));
    live
}

impl Device {
    fn json(&self) -> Value {
        let Self { ordinal, name, used, peak, allocations, stats, live } = self;
        // The library's own object, with PyTorch's names.
        let stats = stats.as_ref().and_then(|stats| serde_json::from_str::<Value>(&stats.to_json()).ok());
        let live = live.iter().map(|Live { library, kind, bytes, blocks }| {
            json!({ "library": library, "kind": kind, "bytes": bytes.get(), "blocks": blocks })
        });
        json!({
            "device": ordinal,
            "name": name,
            "used": used.get(),
            "peak": peak.get(),
            "allocations": allocations,
            "live": live.collect::<Vec<_>>(),
            "stats": stats,
        })
    }
}

/// Columns of one width for all devices.
fn row(f: &mut fmt::Formatter<'_>, name: &str, figures: [&dyn Display; 3]) -> fmt::Result {
    let [first, second, third] = figures.map(ToString::to_string);
    writeln!(f, "{}", format!("  {name:<38}{first:>18}{second:>14}{third:>13}").trim_end())
}

/// A table for each device.
impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lasted, error, status, devices, .. } = self;
        // The program without its folder, and as many of its arguments as stand in the line.
        let command = self.command.join(" ");
        let folder = self.command.first().and_then(|program| program.rfind('/')).map_or(0, |end| end + 1);
        let command: String = command[folder..].chars().take(50).collect();
        writeln!(f, "gpumem: {command} (process {}, {:.1} s)", process::id(), lasted.as_secs_f64())?;
        if let Some(why) = error {
            return writeln!(f, "  its allocations were not intercepted: {why}");
        }
        let Status { intercepted_by, untracked, lost, .. } = status;
        let source =
            intercepted_by.as_deref().map_or("nothing any more", |path| path.rsplit('/').next().unwrap_or(path));
        let exact = if untracked + lost == 0 { "exact" } else { "not exact" };
        writeln!(f, "{exact}: intercepted by {source}, {lost} lost events, {untracked} frees of unknown blocks")?;
        devices.iter().try_for_each(|device| write!(f, "{device}"))
    }
}

impl Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ordinal, name, used, peak, allocations, stats, live } = self;
        let name = name.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
        writeln!(f, "device {ordinal}{name}")?;
        row(f, "", [&"at most", &"live at exit", &"allocations"])?;
        row(f, "allocated", [peak, used, allocations])?;
        if let Some(stats) = stats {
            let kinds = &stats.kinds;
            let kinds = [
                ("device (cuMemAlloc)", &kinds.device),
                ("pool (cuMemAllocAsync)", &kinds.pool),
                ("vmm (cuMemCreate)", &kinds.vmm),
                ("graph (cuGraphLaunch)", &kinds.graph),
                ("not in it: managed", &kinds.managed),
                ("not in it: pinned host", &kinds.pinned_host),
            ];
            for (name, AllocStats { bytes, blocks, .. }) in kinds.iter().filter(|(_, kind)| kind.blocks.allocated > 0) {
                row(f, &format!("  {name}"), [&bytes.peak, &bytes.current, &blocks.allocated])?;
            }
            if let Some(reserved) = stats.reserved {
                row(f, "reserved", [&reserved.peak, &reserved.current, &""])?;
            }
        }
        if !live.is_empty() {
            row(f, "live at exit, by who asked for it", [&"", &"bytes", &"blocks"])?;
        }
        for Live { library, kind, bytes, blocks } in live {
            let library = library.as_deref().unwrap_or("the program, or unknown");
            row(f, &format!("  {library}, {kind}"), [&"", bytes, blocks])?;
        }
        Ok(())
    }
}

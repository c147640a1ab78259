//! Tests on the stand-in driver: a child process, `probe`, runs a script on it. `gpumem_tests::Standin` says more.

mod adoption;
mod calls;
mod capture;
mod contexts;
mod cupti;
mod devices;
mod dispatch;
mod faults;
mod graphs;
mod integrated;
mod lost_devices;
mod pools;
mod refusals;
mod settings;
mod statistics;
mod stubs;
mod torch;
mod tracker;

use gpumem_tests::{Machines, Standin};

/// Programs that need no exact figures: `GPUMEM_GAUGE`, and a script. Nothing is intercepted in them.
const WITHOUT_EXACT_TRACES: [(&str, &str); 4] = [
    ("", "get; get_all; used_no_cache; max_free; available; status; handle; fast"),
    ("", "sampled; drop"),
    ("sampled", "new; report; drop"),
    ("off", "new; report; drop"),
];

/// Returns a machine for each source.
fn both_sources() -> Machines {
    Standin::new().with_each_source()
}

/// Returns a machine with libcupti, and without stubs.
fn with_cupti() -> Standin {
    Standin::new().cupti()
}

//! Tests on the stand-in driver. A child process, `probe`, runs a script on it; see `gpumem_tests::Standin`.

mod adoption;
mod calls;
mod capture;
mod contexts;
mod cupti;
mod devices;
mod dispatch;
mod driver_memory;
mod faults;
mod graphs;
mod integrated;
mod lost_devices;
mod own_memory;
mod rejections;
mod settings;
mod statistics;
mod stubs;
mod torch;
mod tracker;

use gpumem_tests::{Machines, Standin};

/// Programs that need no exact numbers, as values of `GPUMEM_GAUGE` and scripts. In these programs, nothing is intercepted.
const WITHOUT_EXACT_TRACES: [(&str, &str); 4] = [
    ("", "get; get_all; used_no_cache; max_free; available; status; handle; fast"),
    ("", "sampled; drop"),
    ("sampled", "new; report; drop"),
    ("off", "new; report; drop"),
];

/// Returns one machine for each source of exact numbers.
fn both_sources() -> Machines {
    Standin::new().with_each_source()
}

/// Returns a machine with libcupti, and without stubs.
fn with_cupti() -> Standin {
    Standin::new().cupti()
}

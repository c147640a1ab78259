//! Everything that gpumem prints or returns, as JSON. Bytes are exact; what was not measured is `null`.

mod holders;
mod object;
mod output;
mod places;
mod statistics;
mod tracked;

use std::time::Duration;

pub(super) use self::output::output;

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

//! The table of memory by scope.

use std::fmt::{self, Display};

use gpumem::{ByteDelta, Bytes};

use super::Peak;

/// The values of one call of a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallMemory {
    /// The exact change of the bytes in use from the start to the end of the call.
    pub used: i64,
    /// The highest memory in use on the device.
    pub peak: Peak,
    /// The number of cubecl's reservations.
    pub reservations: u64,
    /// The number of reservations of unknown size. cubecl does not report the sizes of parameters and of its own buffers.
    pub without_size: u64,
    /// The sum of the known sizes.
    pub reserved: u64,
    /// The largest of the known sizes.
    pub largest: u64,
}

impl CallMemory {
    /// Formats a sum or maximum of the known sizes: with `≥` if some sizes are not known, and as `?` if no size is known.
    fn known(&self, bytes: u64) -> String {
        match self.without_size {
            0 => Bytes::new(bytes).to_string(),
            without if without == self.reservations => "?".to_owned(),
            _ => format!("≥ {}", Bytes::new(bytes)),
        }
    }
}

/// All calls of a scope.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    count: u64,
    last: Option<CallMemory>,
    peak: Option<Peak>,
    used: i64,
}

impl Calls {
    pub(crate) fn add(&mut self, call: CallMemory) {
        self.count += 1;
        self.used += call.used;
        self.peak = Some(self.peak.map_or(call.peak, |peak| peak.max(call.peak)));
        self.last = Some(call);
    }

    /// Returns the number of calls that ended.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the last call.
    pub fn last(&self) -> Option<&CallMemory> {
        self.last.as_ref()
    }

    /// Returns the highest peak of all calls.
    pub fn peak(&self) -> Option<Peak> {
        self.peak
    }

    /// Returns the sum of [`CallMemory::used`] of all calls.
    pub fn used(&self) -> i64 {
        self.used
    }
}

/// A scope and its calls.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Row {
    /// The names of the scopes that contain this one, the outermost first, and its own name.
    pub path: Vec<String>,
    /// The calls of the scope.
    pub calls: Calls,
}

/// The memory of a device by scope. `Display` prints a table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// The scopes. Each comes before the scopes inside it.
    pub rows: Vec<Row>,
    /// The bytes in use now: `bytes_in_use` of burn's `memory_pool_usage`.
    pub in_use: u64,
    /// The bytes that cubecl holds from the driver or the graphics API: `bytes_reserved`.
    pub pages: u64,
    /// The number of calls that were not measured, because another thread had a scope open, the code panicked, or the device failed.
    pub unmeasured: u64,
    /// True if [`layer`](crate::layer()) saw a reservation. Without it, there are no upper bounds.
    pub is_observed: bool,
}

impl Summary {
    /// Returns cubecl's unused memory, including padding.
    pub fn cache(&self) -> u64 {
        self.pages.saturating_sub(self.in_use)
    }

    /// Returns the bytes in use that were allocated outside of all scopes. Negative if more was freed there.
    pub fn outside(&self) -> i64 {
        let outermost = self.rows.iter().filter(|row| row.path.len() == 1);
        i64::try_from(self.in_use).unwrap_or(i64::MAX) - outermost.map(|row| row.calls.used()).sum::<i64>()
    }
}

/// Writes `≤` before an upper bound, and `≥` before a lower bound if no upper bound is known. A peak whose bounds are equal has no sign.
impl Display for Peak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.at_most {
            Some(most) if most == self.at_least => Bytes::new(most).to_string(),
            Some(most) => format!("≤ {}", Bytes::new(most)),
            None => format!("≥ {}", Bytes::new(self.at_least)),
        };
        f.pad(&text)
    }
}

const HEADING: [&str; 7] = ["scope", "calls", "used", "peak", "peak of all", "reserved", "largest"];

impl Row {
    fn cells(&self) -> [String; 7] {
        let name = format!("{:1$}", "", 2 * (self.path.len() - 1)) + self.path.last().map_or("", String::as_str);
        let [used, peak, reserved, largest] = self.calls.last().map_or_else(Default::default, |call| {
            let [sum, largest] = [call.reserved, call.largest].map(|bytes| call.known(bytes));
            let used = ByteDelta::new(call.used).to_string();
            [used, call.peak.to_string(), format!("{sum} in {}", call.reservations), largest]
        });
        let of_all = self.calls.peak().map_or_else(String::new, |peak| peak.to_string());
        [name, self.calls.count().to_string(), used, peak, of_all, reserved, largest]
    }
}

impl Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<_> = [HEADING.map(str::to_owned)].into_iter().chain(self.rows.iter().map(Row::cells)).collect();
        let widths: [usize; 7] =
            std::array::from_fn(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0));
        for line in &lines {
            write!(f, "{:1$}", line[0], widths[0])?;
            for (cell, width) in line.iter().zip(widths).skip(1) {
                write!(f, "  {cell:>width$}")?;
            }
            writeln!(f)?;
        }
        write!(f, "in use: {} =", Bytes::new(self.in_use))?;
        for row in self.rows.iter().filter(|row| row.path.len() == 1) {
            write!(f, " {} {},", row.path[0], ByteDelta::new(row.calls.used()))?;
        }
        writeln!(f, " outside of scopes {}", ByteDelta::new(self.outside()))?;
        writeln!(f, "cache of burn: {} of {}", Bytes::new(self.cache()), Bytes::new(self.pages))?;
        if !self.is_observed {
            writeln!(
                f,
                "≥: no reservation was seen, so peaks have no upper bound; add gpumem_burn::layer() to the subscriber"
            )?;
        }
        if self.unmeasured > 0 {
            writeln!(
                f,
                "calls that were not measured: {} (another thread had a scope open, a panic, or a device that failed)",
                self.unmeasured
            )?;
        }
        Ok(())
    }
}

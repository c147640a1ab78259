//! Moments of a recording, as users write them, and times as text.

use std::{fmt, str::FromStr, time::Duration};

/// Returns a time in nanoseconds. A time of more than 500 years becomes the largest number.
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A moment of a recording.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Moment {
    Start,
    /// The highest peak. If there are several devices, each has its own.
    Peak,
    End,
    /// The failed allocation that matters most.
    Oom,
    /// This time after the recording started.
    Time(Duration),
}

/// A moment as the user asks for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AskedMoment {
    Known(Moment),
    /// When the process took most, with the driver's own memory.
    ProcessPeak,
}

impl FromStr for AskedMoment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().eq_ignore_ascii_case("process-peak") {
            Ok(Self::ProcessPeak)
        } else {
            text.parse().map(Self::Known)
        }
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start => f.write_str("the start"),
            Self::Peak => f.write_str("the peak"),
            Self::End => f.write_str("the end"),
            Self::Oom => f.write_str("the rejected allocation"),
            Self::Time(time) => f.write_str(&in_words(*time)),
        }
    }
}

impl FromStr for Moment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        match text.to_ascii_uppercase().as_str() {
            "START" => return Ok(Self::Start),
            "PEAK" => return Ok(Self::Peak),
            "END" => return Ok(Self::End),
            "OOM" => return Ok(Self::Oom),
            _ => {}
        }
        let digits = text.find(|sign: char| !sign.is_ascii_digit() && sign != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit = match unit.trim() {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "" | "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            _ => f64::NAN,
        };
        let seconds = number.parse().map_or(f64::NAN, |number: f64| number * unit);
        let time = Duration::try_from_secs_f64(seconds);
        time.map(Self::Time)
            .map_err(|_| "write start, peak, process-peak, end, oom, or a time such as 12.5s, 300ms or 2m".to_owned())
    }
}

/// Returns a time with three or four digits: `12.5 s`, `300 ms`.
pub(crate) fn in_words(time: Duration) -> String {
    let nanos = time.as_nanos();
    let (unit, name) = match nanos {
        0..1_000 => (1, "ns"),
        1_000..1_000_000 => (1_000, "µs"),
        1_000_000..1_000_000_000 => (1_000_000, "ms"),
        _ => (1_000_000_000, "s"),
    };
    let thousandths = nanos * 1000 / unit;
    let decimals = match nanos / unit {
        0..10 => 3,
        10..100 => 2,
        100..1000 => 1,
        _ => 0,
    };
    let text = format!("{}.{:03}", thousandths / 1000, thousandths % 1000);
    let text = &text[..text.len() - (3 - decimals)];
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text };
    format!("{} {name}", text.trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_read_as_users_write_them() {
        let time = |millis| Ok(Moment::Time(Duration::from_millis(millis)));
        for (text, moment) in [
            ("PEAK", Ok(Moment::Peak)),
            ("peak", Ok(Moment::Peak)),
            ("start", Ok(Moment::Start)),
            (" End ", Ok(Moment::End)),
            ("oom", Ok(Moment::Oom)),
            ("12.5s", time(12_500)),
            ("12.5", time(12_500)),
            ("300 ms", time(300)),
            ("2m", time(120_000)),
            ("0", time(0)),
        ] {
            assert_eq!(text.parse::<Moment>(), moment, "{text}");
        }
        for text in ["", "soon", "5 days", "-1", "1e99", "nan", "s", "1.2.3"] {
            assert!(text.parse::<Moment>().is_err(), "{text}");
        }
    }

    #[test]
    fn times_have_a_few_digits() {
        for (nanos, text) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (1_500, "1.5 µs"),
            (12_345_678, "12.34 ms"),
            (300_000_000, "300 ms"),
            (1_000_000_000, "1 s"),
            (12_500_000_000, "12.5 s"),
            (100_000_000_000, "100 s"),
            (4_321_900_000_000, "4321 s"),
        ] {
            assert_eq!(in_words(Duration::from_nanos(nanos)), text);
        }
    }
}

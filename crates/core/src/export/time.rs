//! Writes times as text. They are in UTC, because std does not support time zones.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns seconds and microseconds since 1970; 0 for earlier times.
fn since_1970(time: SystemTime) -> (u64, u32) {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_secs(), since.subsec_micros())
}

/// Returns a time such as `13:59:03Z`.
pub(super) fn clock(time: SystemTime) -> String {
    let (seconds, _) = since_1970(time);
    format!("{:02}:{:02}:{:02}Z", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60)
}

/// Returns a time such as `2018-09-15T13:59:03.000250Z`, as in RFC 3339.
pub(super) fn rfc3339(time: SystemTime) -> String {
    let (seconds, micros) = since_1970(time);
    let (year, month, day) = date(seconds / 86_400);
    let clock = clock(time);
    format!("{year:04}-{month:02}-{day:02}T{}.{micros:06}Z", clock.trim_end_matches('Z'))
}

/// Returns the year, the month and the day of a number of days since 1970-01-01.
fn date(mut days: u64) -> (u64, u64, u64) {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    for (month, length) in (1..).zip(lengths) {
        if days < length {
            return (year, month, days + 1);
        }
        days -= length;
    }
    unreachable!("a year has no more days")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn moments_are_those_of_the_calendar() {
        // The texts come from `date --utc --date=@SECONDS`.
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000250Z"),
            (951_782_400, "2000-02-29T00:00:00.000250Z"),
            (1_537_019_943, "2018-09-15T13:59:03.000250Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000250Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000250Z"),
        ] {
            let time = UNIX_EPOCH + Duration::new(seconds, 250_999);
            assert_eq!(rfc3339(time), text);
            assert_eq!(clock(time), format!("{}Z", &text[11..19]));
        }
        assert_eq!(clock(UNIX_EPOCH - Duration::from_secs(1)), "00:00:00Z");
    }
}

//! Parses amounts of memory at compile time.

/// Parses an amount of bytes with the rules of `gpumem::Bytes`; a test compares both. Unlike there, `-` may come first, and a unit is
/// needed, because `"100"` may mean bytes or MB.
pub(crate) fn bytes(text: &str) -> Option<i128> {
    let trimmed = text.trim();
    if let Some(positive) = trimmed.strip_prefix('-') {
        return bytes(positive).filter(|bytes| *bytes >= 0 && !positive.contains('-')).map(|bytes| -bytes);
    }
    let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    let (whole, part) = decimal(&number.replace('_', ""), 12)?;
    let bytes = whole.checked_mul(1 << shift)?.checked_add((part << shift) / PICO)?;
    u64::try_from(bytes).is_ok().then_some(bytes)
}

/// Parses a percentage such as `5%` or `2.5 %`. Returns hundredths of a per cent.
pub(crate) fn percent(text: &str) -> Option<u32> {
    let number = text.trim().strip_suffix('%')?.trim_end();
    let (whole, part) = decimal(number, 2)?;
    u32::try_from(whole.checked_mul(100)? + part * 100 / PICO).ok()
}

const PICO: i128 = 1_000_000_000_000;

/// Parses a number without a sign and with at most `decimals` decimals. Returns the whole part, and the fraction times 10^12.
fn decimal(text: &str, decimals: usize) -> Option<(i128, i128)> {
    let (whole, part) = text.split_once('.').map_or((text, None), |(whole, part)| (whole, Some(part)));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || part.is_some_and(|part| !digits(part) || part.len() > decimals) {
        return None;
    }
    let part = format!("{:0<12}", part.unwrap_or(""));
    Some((whole.parse().ok()?, part.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::{bytes, percent};

    #[test]
    fn amounts_are_parsed_as_in_the_library() {
        for text in [
            "0 B",
            "17 B",
            "1_000b",
            "4k",
            "512 MB",
            " 16GiB ",
            "1.5 gib",
            "0.1 GiB",
            "2TiB",
            "18446744073709551615 B",
            "18446744073709551616 B",
            "",
            "MiB",
            "1.",
            ".5GiB",
            "1.2.3",
            "12 parsecs",
            "16777216TiB",
            "1e9",
            "0x10",
            "٣ B",
            "1.0000000000001 B",
            "_ B",
            "+1 B",
            "99999999999999999999999999999999999999999 TiB",
        ] {
            let library = text.parse::<gpumem::Bytes>().ok().map(|bytes| i128::from(bytes.get()));
            assert_eq!(bytes(text), library, "{text}");
        }
        assert_eq!(bytes("-20 MiB"), Some(-(20 << 20)));
        assert_eq!(bytes("--1 B"), None);
        assert_eq!(bytes("- 1 B"), Some(-1));
        for text in ["0", "100", "1_000", "1.5", "-1"] {
            assert_eq!(bytes(text), None, "{text}: bytes or MB?");
        }
    }

    #[test]
    fn percentages_are_parsed() {
        for (text, percentage) in
            [("5%", Some(500)), ("2.5 %", Some(250)), ("0%", Some(0)), ("5", None), ("-5%", None), ("%", None)]
        {
            assert_eq!(percent(text), percentage, "{text}");
        }
    }
}

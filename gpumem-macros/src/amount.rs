//! Parses amounts of memory at compile time.

/// Parses an amount of bytes by the rules of `gpumem::Bytes`; `tests/sim_attribute` compares the two. Two rules differ: the amount may
/// start with `-`, and it needs a unit, because `"100"` may mean bytes or MB.
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

/// Parses a percentage such as `5%` or `2.5 %`. Returns it in hundredths of a per cent.
pub(crate) fn percent(text: &str) -> Option<u32> {
    let number = text.trim().strip_suffix('%')?.trim_end();
    let (whole, part) = decimal(number, 2)?;
    u32::try_from(whole.checked_mul(100)? + part * 100 / PICO).ok()
}

const PICO: i128 = 1_000_000_000_000;

/// Parses a number that has no sign and at most `decimals` decimals. Returns the whole part, and the fraction times 10^12.
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
    use super::percent;

    #[test]
    fn percentages_are_parsed() {
        for (text, percentage) in
            [("5%", Some(500)), ("2.5 %", Some(250)), ("0%", Some(0)), ("5", None), ("-5%", None), ("%", None)]
        {
            assert_eq!(percent(text), percentage, "{text}");
        }
    }
}

//! Parses sizes and names of cards, as users write them.

use crate::model::{Bytes, bounded};

/// The memory that a process uses on the GPU of a dry run in addition to its blocks: the primary context of an empty process, measured on
/// an H200 with driver 580.
pub const CONTEXT: Bytes = Bytes::mib(527);

/// The part of it that NVML lists for no process.
pub const OF_NO_PROCESS: Bytes = Bytes::mib(9);

/// Parses a number with a unit, such as `80GiB`. A unit is required except for 0, because a user who types 80 does not mean 80 bytes.
///
/// # Errors
/// The error explains what is wrong with the text.
pub fn size(text: &str) -> Result<Bytes, String> {
    let bytes: Bytes = text.parse().map_err(|error| format!("{error}"))?;
    if text.trim() != "0" && !text.contains(char::is_alphabetic) {
        return Err(format!("it has no unit; write a size such as {}GiB", bounded(text.trim(), 16)));
    }
    Ok(bytes)
}

/// The cards, each with its total memory in MiB as `torch.cuda.mem_get_info()` returns it, which appears in users' reports. The total is
/// less than nvidia-smi shows, because the driver reserves a part. Other versions of the driver may reserve a few MiB more or less.
const CARDS: &[(&str, u64)] = &[
    ("T4", 14_930),
    ("V100 16GB", 16_148),
    ("V100 32GB", 32_502),
    ("RTX 3060", 12_032),
    ("RTX 3080", 10_014),
    ("RTX 3090", 24_259),
    ("RTX 4060", 7_936),
    ("RTX 4090", 24_207),
    ("RTX 5090", 32_122),
    ("RTX A4000", 15_984),
    ("RTX A6000", 48_681),
    ("RTX 6000 Ada", 45_496),
    ("A10G", 22_589),
    ("L4", 22_579),
    ("L40S", 45_466),
    ("A100 40GB", 40_335),
    ("A100 80GB", 81_050),
    ("H100", 81_009),
    ("H200", 143_155),
    ("B200", 182_630),
];

/// Returns the smallest known GPU that has this much memory: its name and its size.
pub fn smallest_card(needed: Bytes) -> Option<(&'static str, Bytes)> {
    let large = CARDS.iter().map(|(name, mib)| (*name, Bytes::mib(*mib))).filter(|(_, size)| *size >= needed);
    large.min_by_key(|(_, size)| *size)
}

/// Parses a size or the name of a GPU, and returns the size.
///
/// # Errors
/// The error explains what is wrong with the text.
pub fn card(text: &str) -> Result<Bytes, String> {
    let plain = |name: &str| name.to_lowercase().replace([' ', '-', '_'], "");
    let requested = plain(text);
    let is_requested = |card: &&(&str, u64)| plain(card.0) == requested || plain(card.0) == format!("rtx{requested}");
    if let Some((_, mib)) = CARDS.iter().find(is_requested) {
        return Ok(Bytes::mib(*mib));
    }
    let bytes = size(text).map_err(|why| {
        if text.contains(char::is_numeric) && !requested.starts_with(char::is_alphabetic) {
            why
        } else {
            let names = |is_meant: &dyn Fn(&str) -> bool| {
                let names: Vec<_> = CARDS.iter().map(|(name, _)| *name).filter(|name| is_meant(name)).collect();
                names.join(", ")
            };
            let alike = names(&|name| plain(name).starts_with(&requested));
            if alike.is_empty() || requested.is_empty() {
                format!("no GPU of this name is known; write a size such as 24GiB, or one of {}", names(&|_| true))
            } else {
                format!("this may be one of {alike}")
            }
        }
    })?;
    if bytes < CONTEXT { Err(format!("a CUDA context takes {CONTEXT}; write a larger size")) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_card_is_large_enough() {
        let name = |mib: u64| smallest_card(Bytes::mib(mib)).map(|(name, _)| name);
        assert_eq!(
            [1, 7_936, 7_937, 24_000, 200_000].map(name),
            [Some("RTX 4060"), Some("RTX 4060"), Some("RTX 3080"), Some("RTX 4090"), None]
        );
    }

    #[test]
    fn units_are_powers_of_1024() {
        for (text, bytes) in [
            ("100MB", Bytes::mib(100)),
            ("100MiB", Bytes::mib(100)),
            ("80GB", Bytes::gib(80)),
            ("80 gib", Bytes::gib(80)),
            ("1.5GB", Bytes::mib(1536)),
            ("64kb", Bytes::kib(64)),
            ("7B", Bytes::new(7)),
            ("0", Bytes::ZERO),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "80", "0.5", "much", "-1GiB", "1PiB", "1e3MB", "inf"] {
            assert!(size(text).is_err(), "{text}");
        }
        assert_eq!(size("80").unwrap_err(), "it has no unit; write a size such as 80GiB");
    }

    #[test]
    fn cards_have_a_size_or_a_name() {
        assert_eq!(card("24GiB"), Ok(Bytes::gib(24)));
        assert_eq!(card("1TiB"), Ok(Bytes::gib(1024)));
        for name in ["RTX 4090", "rtx-4090", "4090"] {
            assert_eq!(card(name), Ok(Bytes::mib(24_207)), "{name}");
        }
        assert_eq!(card("h100"), card("H100"));
        assert!(card("H300").unwrap_err().contains("one of T4, V100 16GB"));
        assert_eq!(card("A100").unwrap_err(), "this may be one of A100 40GB, A100 80GB");
        assert!(card("24").unwrap_err().contains("it has no unit"));
        assert!(card("24MiB").is_err() && card("-1GiB").is_err() && card("").is_err());
    }
}

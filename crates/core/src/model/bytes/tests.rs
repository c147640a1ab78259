use super::*;

#[test]
fn amounts_are_read() {
    for (text, bytes) in [
        ("0", 0),
        ("17", 17),
        ("17 B", 17),
        ("1_000", 1000),
        ("4k", 4 << 10),
        ("512 MB", 512 << 20),
        ("512MiB", 512 << 20),
        (" 16GiB ", 16 << 30),
        ("1.5 gib", 3 << 29),
        ("2TiB", 2 << 40),
        ("18446744073709551615", u64::MAX),
    ] {
        assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
    }
}

#[test]
fn the_error_contains_the_text() {
    for text in ["", "MiB", "-1", "1.", ".5GiB", "1.2.3", "12 parsecs", "16777216TiB", "1e9", "0x10", "٣"] {
        let error = text.parse::<Bytes>().expect_err(text);
        assert!(error.to_string().contains(&format!("`{text}`")), "{error}");
    }
}

#[test]
fn amounts_are_printed_and_read_back() {
    for (bytes, text) in [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (256 << 20, "256 MiB"),
        (16 << 30, "16 GiB"),
        ((1 << 30) + (1 << 29), "1.50 GiB"),
        (1 << 40, "1 TiB"),
    ] {
        assert_eq!(Bytes(bytes).to_string(), text);
        assert_eq!(text.parse(), Ok(Bytes(bytes)));
    }
    assert_eq!(format!("[{:>9}]", Bytes::mib(1)), "[    1 MiB]");
    assert_eq!(format!("{:?}", Bytes(5)), "Bytes(5)");
}

#[test]
fn sums_do_not_wrap() {
    assert_eq!(Bytes(u64::MAX) + Bytes(1), Bytes(u64::MAX));
    assert_eq!([Bytes(u64::MAX), Bytes(2)].into_iter().sum::<Bytes>(), Bytes(u64::MAX));
    let largest = u64::MAX >> 10;
    assert_eq!(Bytes::kib(largest), Bytes(largest << 10));
    for (amount, constructor) in
        [(1 << 54, Bytes::kib as fn(u64) -> Bytes), (1 << 44, Bytes::mib), (1 << 34, Bytes::gib)]
    {
        assert!(std::panic::catch_unwind(|| constructor(amount)).is_err());
    }
}

#[test]
fn mb_rounds_as_python_does() {
    assert_eq!(Bytes((1 << 20) - 1).mb(), 0);
    assert_eq!(Bytes((2 << 20) - 1).mb(), 1);
    assert_eq!(ByteDelta(-1).mb(), 0);
    assert_eq!(ByteDelta(-(1 << 20) - 1).mb(), -1);
    assert_eq!(ByteDelta(-(3 << 29)).to_string(), "-1.50 GiB");
    assert_eq!(ByteDelta(i64::MIN).to_string(), "-8388608 TiB");
}

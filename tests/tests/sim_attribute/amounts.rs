//! Tests that the macros parse amounts in attributes by the same rules as the library.

use amount::bytes;

#[allow(dead_code, reason = "the macros use the rest")]
#[path = "../../../gpumem-macros/src/amount.rs"]
mod amount;

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

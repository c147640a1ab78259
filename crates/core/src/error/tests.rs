use std::{error::Error as _, io, time::Duration};

use super::{Error, Kind};

type Predicate = (&'static str, fn(&Error) -> bool);

const PREDICATES: &[Predicate] = &[
    ("unavailable", Error::is_unavailable),
    ("missing library", Error::is_missing_library),
    ("busy", Error::is_busy),
    ("unknown device", Error::is_unknown_device),
    ("invalid setting", Error::is_invalid_setting),
    ("out of memory", Error::is_out_of_memory),
    ("forked", Error::is_forked),
    ("unknown block", Error::is_unknown_block),
];

fn call(name: &str, fatal: bool) -> Kind {
    Kind::Call { library: "libcuda", call: "cuCall", code: 7, name: name.to_owned(), device: Some(0), fatal }
}

fn no_library() -> Kind {
    Kind::NoLibrary { library: "libcupti", detail: "no such file".to_owned() }
}

fn busy() -> Kind {
    Kind::Busy { holder: "nsys".to_owned() }
}

fn no_source(cupti: Kind) -> Kind {
    let dispatch = Kind::NoDispatch { detail: "unknown layout".to_owned() };
    Kind::NoSource { dispatch: dispatch.into(), cupti: cupti.into() }
}

fn no_device(count: u32) -> Kind {
    Kind::NoDevice { ordinal: 9, count, simulated: false }
}

fn detail() -> String {
    "detail".to_owned()
}

/// Returns every kind, with the predicates that are true for it.
fn kinds() -> Vec<(Kind, Vec<&'static str>)> {
    vec![
        (no_library(), vec!["unavailable", "missing library"]),
        (Kind::NoSymbol { library: "libcuda", symbol: detail() }, vec!["unavailable", "missing library"]),
        (call("CUDA_ERROR_INVALID_VALUE", false), vec![]),
        (call("CUDA_ERROR_NO_DEVICE", true), vec!["unavailable"]),
        (call("CUDA_ERROR_OUT_OF_MEMORY", false), vec!["out of memory"]),
        (no_device(2), vec!["unknown device"]),
        (no_device(0), vec!["unavailable", "unknown device"]),
        (Kind::NoMemoryInfo { source: "NVML", device: 0 }, vec!["unavailable"]),
        (Kind::NoContext { ordinal: 0, why: Box::new(no_library().into()) }, vec!["unavailable", "missing library"]),
        (Kind::NotBuilt { feature: "nvml" }, vec!["unavailable"]),
        (Kind::NoGauge { gauge: "pool", why: "no pools" }, vec!["unavailable"]),
        (Kind::NoDispatch { detail: detail() }, vec!["unavailable"]),
        (no_source(no_library()), vec!["unavailable", "missing library"]),
        (no_source(busy()), vec!["busy"]),
        (Kind::OtherSource { requested: "cupti", using: "dispatch" }, vec!["unavailable"]),
        (busy(), vec!["busy"]),
        (Kind::Forked, vec!["unavailable", "forked"]),
        (Kind::UnknownBlock { address: 16, why: None }, vec!["unknown block"]),
        (
            Kind::UnknownBlock { address: 16, why: Some(Box::new(Kind::Forked.into())) },
            vec!["unavailable", "forked", "unknown block"],
        ),
        (Kind::BadSetting { setting: "GPUMEM_GAUGE", detail: detail() }, vec!["invalid setting"]),
        (Kind::BadBaseline { file: detail(), detail: detail() }, vec![]),
        (Kind::NoAnswer { within: Duration::from_secs(2) }, vec![]),
        (Kind::CustomGauge { name: detail(), detail: detail() }, vec![]),
        (Kind::NoThread { detail: detail() }, vec![]),
        (
            Kind::SimulatedOutOfMemory { device: 0, requested: detail(), free: detail(), total: detail() },
            vec!["out of memory"],
        ),
        (Kind::SimulatedMisuse { device: 0, detail: "misuse" }, vec![]),
    ]
}

#[test]
fn each_kind_has_its_predicates() {
    for (kind, expected) in kinds() {
        let error = Error::from(kind);
        let holds: Vec<_> = PREDICATES.iter().filter(|(_, holds)| holds(&error)).map(|(name, _)| *name).collect();
        assert_eq!(holds, expected, "{error}");
    }
}

#[test]
fn each_message_is_complete() {
    for (kind, _) in kinds() {
        let error = Error::from(kind);
        let message = error.to_string();
        assert_eq!(format!("{error:?}"), message);
        assert!(!message.ends_with(['.', '\n']) && !message.contains("  "), "{message}");
        if let Some(cause) = error.source() {
            assert!(message.contains(&cause.to_string()), "{message}");
        }
    }
}

#[test]
fn the_source_is_the_error_that_led_to_this_one() {
    let cause = |kind: Kind| Error::from(kind).source().map(ToString::to_string);
    assert_eq!(cause(Kind::Forked), None);
    assert_eq!(cause(no_source(busy())), Some(Error::from(busy()).to_string()));
    let why = Box::new(Error::from(no_source(no_library())));
    let error = Error::from(Kind::UnknownBlock { address: 16, why: Some(why) });
    let source = error.source().and_then(|source| source.downcast_ref::<Error>()).unwrap();
    assert_eq!(*source, Error::from(no_source(no_library())));
    assert_eq!(source.source().map(ToString::to_string), Some(Error::from(no_library()).to_string()));
}

#[test]
fn the_error_of_another_library_is_kept() {
    let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
    let kind = Kind::NoThread { detail: denied().to_string() };
    let error = Error::from(kind.clone()).because(denied());
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>()).unwrap();
    assert_eq!(source.kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(error, Error::from(kind), "the text says the same");
}

#[test]
fn a_result_is_small() {
    assert_eq!(size_of::<crate::error::Result<()>>(), size_of::<usize>());
}

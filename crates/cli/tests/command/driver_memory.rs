//! Tests what the command shows of the memory that the driver takes by itself.

use gpumem_core::model::{Block, Bytes, CallsiteId, DriverGauge, EventKind, GpuMemory, Key, MemKind, Space};
use gpumem_recording::Item;

use crate::{
    page::page,
    ran,
    recording_builder::{DEVICE, MIB, RecordingBuilder, callsite},
    report::{json, printed, recorded, training},
};

fn measured(name: &str, by: DriverGauge) -> String {
    recorded(name, RecordingBuilder::new("train").with_driver_memory(by))
}

/// The pool has 48 MiB at its reading, and 16 MiB of them are allocated later.
#[test]
fn everything_that_the_card_shows_is_one_sum() {
    let file = measured("driver.capture", DriverGauge::Process);
    let end = &json(&["report", "--at", "end", "--json", &file])["devices"][0];
    let process = &end["process"];
    let taken = 526 + 140 + 3072 + 100 + 32;
    assert_eq!(process["measured_by"], "process");
    assert_eq!(process["allocated_bytes"], (63 + 16) * MIB);
    assert_eq!(process["rounding_bytes"], MIB);
    assert_eq!(process["driver_bytes"], taken * MIB);
    assert_eq!(process["bytes"], (63 + 16 + 1 + taken) * MIB);
    assert_eq!((&end["bytes"], &end["blocks"]), (&(79 * MIB).into(), &2.into()));
    let rows = process["taken_by_driver"].as_array().unwrap();
    let rows: Vec<_> = rows.iter().map(|row| (row["kind"].as_str().unwrap(), row["bytes"].as_u64().unwrap())).collect();
    let expected = [("local memory", 3072), ("context", 526), ("modules", 140), ("executable graphs", 100)];
    let expected = expected.into_iter().chain([("unused in pools", 32)]);
    assert_eq!(rows, expected.map(|(kind, mib)| (kind, mib * MIB)).collect::<Vec<_>>());
    // The device had the most before the last allocation took 16 MiB of the pool's unused memory, and not more after it.
    let peak = &json(&["report", "--json", &file])["devices"][0];
    assert_eq!(peak["process_peak"]["bytes"], process["bytes"]);
    assert_eq!(peak["peak_bytes"], 95 * MIB);
}

#[test]
fn the_drivers_memory_is_no_allocation() {
    let file = measured("driver-counts.capture", DriverGauge::Process);
    let report = json(&["report", "--json", &file]);
    assert_eq!((&report["allocations"], &report["frees"]), (&3.into(), &1.into()));
    assert_eq!((&report["not_freed"]["blocks"], &report["not_freed"]["bytes"]), (&2.into(), &(79 * MIB).into()));
    assert_eq!(report["devices"][0]["besides"], serde_json::json!([]));
    assert_eq!(report["missing"]["unreadable_items"], 0);
    for view in ["--calls", "--table", "--tree"] {
        let text = printed(&["report", view, &file]);
        assert!(!text.contains("context") && !text.contains("3072"), "{text}");
    }
}

/// Somebody whose card is full sees why on the first line of the device.
#[test]
fn the_summary_names_the_cause_first_if_the_driver_took_much() {
    let text = printed(&["report", &measured("driver-much.capture", DriverGauge::Process)]);
    let line = text.lines().find(|line| line.starts_with("device 0")).unwrap();
    let expected = "device 0: the process took 3.86 GiB after 1 s: local memory of deep (src/model.rs:77) 3 GiB, context 526 MiB, \
                    modules of libcublasLt.so.13 140 MiB and 3 more; allocations 63 MiB";
    assert_eq!(line, expected, "{text}");
    assert!(text.contains("the peak was 95 MiB\n") && text.contains("Not seen: other processes.\n"), "{text}");

    let mut little = RecordingBuilder::new("train");
    little.event(EventKind::DriverMeasured { device: DEVICE, by: DriverGauge::Process });
    little.taken(500 * MIB, MemKind::Context, 5, "");
    little.alloc(10_000 * MIB, MemKind::Device, 0);
    let text = printed(&["report", &recorded("driver-little.capture", little)]);
    let line = text.lines().find(|line| line.starts_with("device 0")).unwrap();
    let expected = "device 0: the peak was 9.77 GiB, and 10.25 GiB with the driver's own memory: context 500 MiB";
    assert_eq!(line, expected, "{text}");
}

/// The kernel raises the local memory again after a limit gave back a part of it.
#[test]
fn causes_of_one_kind_are_named_by_what_they_share() {
    let mut builder = RecordingBuilder::new("train");
    builder.event(EventKind::DriverMeasured { device: DEVICE, by: DriverGauge::Process });
    builder.taken(2048 * MIB, MemKind::LocalMemory, 2, "deep");
    builder.taken(1024 * MIB, MemKind::LocalMemory, 3, "deep");
    builder.taken(100 * MIB, MemKind::Modules, 4, "libcublasLt.so.13");
    builder.taken(20 * MIB, MemKind::Modules, 4, "libcufft.so.12");
    builder.alloc(MIB, MemKind::Device, 0);
    let file = recorded("driver-shared-causes.capture", builder);
    let text = printed(&["report", &file]);
    assert!(text.contains(": local memory of deep 3 GiB, modules 120 MiB, rest of 2 MiB pages 1 MiB; "), "{text}");
    let rows = &json(&["report", "--json", &file])["devices"][0]["process_peak"]["taken_by_driver"];
    assert_eq!((&rows[0]["label"], &rows[0]["bytes_per_thread"]), (&"deep".into(), &16384.into()), "{rows}");
    assert_eq!(rows[2]["bytes_per_thread"], serde_json::Value::Null, "{rows}");
}

#[test]
fn upper_bounds_say_so() {
    let file = measured("driver-at-most.capture", DriverGauge::AtMost);
    let text = printed(&["report", &file]);
    assert!(text.contains(
        "the process took ≤ 3.86 GiB after 1 s: local memory of deep (src/model.rs:77) ≤ 3 GiB, context ≤ 526 MiB"
    ));
    assert_eq!(text.matches("≤: other processes may use the device").count(), 1, "{text}");
    assert!(text.contains("\n200 executable graphs (≤ 100 MiB) and ≤ 32 MiB unused in pools at the end ("), "{text}");
    let text = printed(&["report", "--at", "end", &file]);
    assert!(text.contains("taken by the driver (≤)") && text.contains("together ≤ 3.86 GiB: 79 MiB of"), "{text}");
    assert_eq!(json(&["report", "--json", &file])["devices"][0]["process_peak"]["measured_by"], "at most");
    let text = printed(&["diff", &file, &file]);
    assert!(text.contains("the process took ≤ 3.86 GiB and takes ≤ 3.86 GiB: no change"), "{text}");
    assert_eq!(text.matches("≤: other processes may use the device").count(), 1, "{text}");
    // Nothing was allocated.
    let mut only = RecordingBuilder::new("train");
    only.event(EventKind::DriverMeasured { device: DEVICE, by: DriverGauge::AtMost });
    only.taken(500 * MIB, MemKind::Context, 5, "");
    let text = printed(&["report", &recorded("driver-only.capture", only)]);
    assert!(
        text.contains("device 0: the process took ≤ 500 MiB after 2 µs: context ≤ 500 MiB; allocations 0 B\n"),
        "{text}"
    );
    assert!(text.contains("nothing was allocated\n≤: other processes may use the device"), "{text}");
}

#[test]
fn a_recording_without_measurement_shows_nothing_of_the_driver() {
    let file = training("driver-not-measured.capture");
    for view in [&[][..], &["--leaks"], &["--at", "end"], &["--between", "start", "end"]] {
        let text = printed(&[&["report"], view, &[&file]].concat());
        assert!(!text.contains("driver's own") && !text.contains("taken by the driver"), "{text}");
    }
    assert!(json(&["report", "--json", &file])["devices"][0]["process_peak"].is_null());
    assert!(json(&["report", "--at", "end", "--json", &file])["devices"][0]["process"].is_null());
    assert!(json(&["report", "--leaks", "--json", &file])["kept_by_driver"][0]["sums"].is_null());
}

#[test]
fn graphs_that_were_not_destroyed_and_the_memory_of_pools_are_with_what_was_not_freed() {
    let file = measured("driver-kept.capture", DriverGauge::Process);
    let text = printed(&["report", "--leaks", &file]);
    let graphs = "200 executable graphs (100 MiB) not destroyed at the end\n made executable at  MiB  blocks";
    assert!(text.contains(graphs) && text.contains(" src/adam.rs:30      100     200 "), "{text}");
    assert!(text.contains("lets later graphs reuse the memory, but does not return it"), "{text}");
    assert!(
        text.contains("32 MiB unused in pools (0x5000 (release threshold 1 GiB)) at the end\ncuMemPoolTrimTo"),
        "{text}"
    );
    let text = printed(&["report", &file]);
    let line =
        "\n200 executable graphs (100 MiB) and 32 MiB unused in pools at the end (--leaks shows what gives it back)\n";
    assert!(text.contains(line), "{text}");
    let sums = &json(&["report", "--leaks", "--json", &file])["kept_by_driver"][0]["sums"];
    assert_eq!(sums, &json(&["report", "--json", &file])["kept_by_driver"][0]["sums"]);
    assert_eq!((&sums[0]["blocks"], &sums[0]["place"]), (&200.into(), &"src/adam.rs:30".into()));
    assert_eq!(sums[1]["bytes"], 32 * MIB);
}

/// The local memory and the graphs come one second after the rest.
#[test]
fn moments_have_a_table_of_the_drivers_memory_and_the_sum() {
    let file = measured("driver-moments.capture", DriverGauge::Process);
    let text = printed(&["report", "--at", "peak", &file]);
    assert!(text.contains("\n context                                526  "), "{text}");
    assert!(
        text.contains(
            "together 762 MiB: 95 MiB of allocations and 667 MiB taken by the driver
"
        ),
        "{text}"
    );
    assert!(!text.contains("local memory"), "{text}");
    let text = printed(&["report", "--between", "0.5s", "end", &file]);
    assert!(text.contains(" local memory of deep (src/model.rs:77), 16 KiB per thr…  3072 "), "{text}");
    assert!(!text.contains("context"), "{text}");
    let between = &json(&["report", "--between", "0.5s", "end", "--json", &file])["devices"][0]["process"];
    // The allocation of 16 MiB came from the unused memory of the pool.
    assert_eq!(between["bytes"], (3072 + 100) * MIB);
    assert_eq!((&between["allocated_bytes"], &between["seconds"]), (&(16 * MIB).into(), &serde_json::Value::Null));
    assert_eq!(between["driver_bytes"], (3072 + 100 - 16) * MIB);
}

/// A reading finds memory that no call explains.
#[test]
fn memory_that_is_not_known_has_what_ran_when_it_grew() {
    let mut builder = RecordingBuilder::new("train");
    builder.event(EventKind::DriverMeasured { device: DEVICE, by: DriverGauge::Process });
    let grow = |builder: &mut RecordingBuilder, key: u64| {
        let block = Block::new(DEVICE, Bytes::new(4 * MIB), MemKind::NotKnown);
        builder.alloc_at(Key::new(Space::Driver, key), block);
    };
    grow(&mut builder, 1);
    let scope = builder.open(1);
    builder.alloc(2 * MIB, MemKind::Device, 1);
    builder.wait(2_000_000);
    grow(&mut builder, 2);
    builder.close(scope);
    let file = recorded("driver-not-known.capture", builder);
    let text = printed(&["report", "--at", "end", &file]);
    let rows: Vec<_> = text.lines().filter(|line| line.starts_with(" not known")).collect();
    let [first, second] = rows[..] else { panic!("{text}") };
    assert!(first.starts_with(" not known, grew at 0.00 s  "), "{text}");
    assert!(second.starts_with(" not known, grew at 2.00 s in train, after an allo"), "{text}");
}

/// Each call of NCCL is a scope with the number of its communicator.
#[test]
fn communicators_have_their_memory() {
    let mut builder = RecordingBuilder::new("train");
    for (id, name) in [(50, "NCCL:ncclCommInitRank (communicator 1)"), (51, "NCCL:ncclAllReduce (communicator 1)")] {
        builder.item(&Item::Callsite(callsite(id, name, "", 0)));
    }
    builder.item(&Item::Callsite(callsite(52, "NCCL:communicator 1 has 8 ranks", "", 0)));
    builder.event(EventKind::DriverMeasured { device: DEVICE, by: DriverGauge::Process });
    builder.taken(500 * MIB, MemKind::Context, 5, "");
    let created = builder.open(48);
    builder.alloc(16 * MIB, MemKind::Vmm, 0);
    builder.alloc(3 * MIB, MemKind::PinnedHost, 0);
    builder.event(EventKind::Mark { callsite: CallsiteId(52) });
    builder.close(created);
    let reduces = builder.open(49);
    builder.taken(100 * MIB, MemKind::Modules, 4, "libnccl.so.2");
    builder.close(reduces);
    let file = recorded("driver-communicators.capture", builder);
    let text = printed(&["report", &file]);
    assert!(text.contains("\nNCCL     communicator 1 (8 ranks): blocks 16 MiB, driver 100 MiB\n"), "{text}");
    let found = &json(&["report", "--json", &file])["devices"][0]["communicators"];
    let expected = serde_json::json!([
        {"number": 1, "ranks": 8, "allocated_bytes": 16 * MIB, "driver_bytes": 100 * MIB}
    ]);
    assert_eq!(found, &expected);
}

#[test]
fn ranks_have_the_memory_of_their_process() {
    let [first, second] = [0, 1].map(|rank| measured(&format!("driver-rank-{rank}.capture"), DriverGauge::Process));
    let text = printed(&["report", &first, &second, &training("driver-rank-2.capture")]);
    assert!(text.contains("  at the end  process\n") && text.matches("     3950  ").count() == 2, "{text}");
    let text = printed(&["report", &training("driver-rank-3.capture"), &training("driver-rank-4.capture")]);
    assert!(!text.contains("process"), "{text}");
}

/// The kernel needs its local memory after the peak of allocations.
#[test]
fn the_moment_at_which_the_process_took_most_can_be_shown() {
    let file = measured("driver-process-peak.capture", DriverGauge::Process);
    let peak = &json(&["report", "--json", &file])["devices"][0]["process_peak"];
    let shown = &json(&["report", "--at", "process-peak", "--json", &file])["devices"][0]["process"];
    assert_eq!((&shown["bytes"], &shown["seconds"]), (&peak["bytes"], &peak["seconds"]));
    let failed = ran(&["report", "--at", "process-peak", &training("driver-no-process-peak.capture")]);
    assert_eq!(failed.code, Some(2));
    assert!(failed.stderr.contains("it does not contain the driver's own memory"), "{}", failed.stderr);
}

/// The page has each kind over time, without the sum, which would count allocations twice.
#[test]
fn the_page_has_the_drivers_memory_over_time() {
    let (_, text) = page("driver", &[&measured("driver-page.capture", DriverGauge::Process)]);
    assert!(text.contains(
        r#""driver":{"words":"the process took 3.86 GiB after 1 s: local memory of deep (src/model.rs:77) 3 GiB"#
    ));
    // Some events have the time of an earlier one.
    assert!(text.contains(r#"{"name":"context","values":[[2000,551550976]]}"#), "{text}");
    assert!(text.contains(r#"{"name":"modules","values":[[3000,104857600],[5000,146800640]]}"#), "{text}");
    assert!(!text.contains(r#""name":"the process""#), "{text}");
    let (_, text) = page("driver-none", &[&training("driver-page-none.capture")]);
    assert!(text.contains(r#""driver":null"#), "{text}");
}

/// A larger module is a difference, but no increase of allocations.
#[test]
fn the_difference_of_two_recordings_has_the_drivers_memory() {
    let before = measured("driver-before.capture", DriverGauge::Process);
    let mut more = RecordingBuilder::new("train").with_driver_memory(DriverGauge::Process);
    more.taken(8 * MIB, MemKind::Modules, 4, "compiled kernel triton_poi_fused_0");
    let after = recorded("driver-after.capture", more);
    let text = printed(&["diff", "--fail-on-increase", "0%", &before, &after]);
    assert!(
        text.contains(
            "the process took 3.86 GiB and takes 3.87 GiB: +8 MiB (+0.2 %); allocations: +16 MiB (+25.4 %)\n"
        ),
        "{text}"
    );
    assert!(text.contains("modules of compiled kernel triton_poi_fused_0"), "{text}");
    let difference = &json(&["diff", "--json", &before, &after])["devices"][0]["process"];
    assert_eq!((&difference["change_bytes"], &difference["is_at_most"]), (&(8 * MIB).into(), &false.into()));
    assert_eq!(difference["allocations"]["change_bytes"], 16 * MIB);
    let not_measured = training("driver-diff-none.capture");
    assert!(json(&["diff", "--json", &before, &not_measured])["devices"][0]["process"].is_null());
}

/// Returns a recording of a program whose last allocation was rejected, and of the reading of the device that followed.
fn rejected(name: &str, by: Option<DriverGauge>, is_read: bool) -> String {
    let mut made = RecordingBuilder::new("train");
    match by {
        Some(by) => made = made.with_driver_memory(by),
        None => drop(made.alloc(79 * MIB, MemKind::Device, 0)),
    }
    made.rejected(64 << 30, MemKind::Device, 2);
    if is_read {
        let memory = GpuMemory::new(Bytes::gib(141), Bytes::mib(300), Bytes::mib(140_000), None);
        made.event(EventKind::Sample { device: DEVICE, memory });
    }
    // What is taken later did not matter for the rejected allocation.
    made.taken(5 << 30, MemKind::Limits, 2, "device heap");
    recorded(name, made)
}

#[test]
fn a_rejected_allocation_says_who_had_the_memory() {
    let line = |file: &str| {
        let text = printed(&["report", file]);
        text.lines().find(|line| line.starts_with("Device 0 has ")).unwrap_or_default().to_owned()
    };
    let in_use = |file: &str| json(&["report", "--json", file])["refused"]["in_use"].clone();
    let file = rejected("rejected-driver.capture", Some(DriverGauge::Process), true);
    assert_eq!(
        line(&file),
        "Device 0 has 141 GiB. Shortly after: free 300 MiB; in use by allocations 79 MiB, by the driver for this process \
         3.78 GiB (most: local memory of deep (src/model.rs:77) 3 GiB), by others 132.86 GiB."
    );
    let driver = 1 + 526 + 140 + 3072 + 100 + 32;
    assert_eq!(
        in_use(&file),
        serde_json::json!({
            "free_bytes": 300 * MIB, "allocated_bytes": 79 * MIB, "driver_bytes": driver * MIB, "is_at_most": false,
            "largest_of_driver": { "name": "local memory of deep (src/model.rs:77)", "bytes": 3072 * MIB },
            "other_processes_bytes": null, "rest_bytes": (140_000 - 79 - driver) * MIB,
        })
    );
    let at_most = line(&rejected("rejected-at-most.capture", Some(DriverGauge::AtMost), true));
    assert!(
        at_most.contains("process ≤ 3.78 GiB (most: ") && at_most.contains(", by others ≥ 132.86 GiB."),
        "{at_most}"
    );
    let not_read = rejected("rejected-not-read.capture", Some(DriverGauge::Process), false);
    let expected = "Device 0 has 141 GiB. At that time: in use by allocations 79 MiB, by the driver for this process 3.78 GiB \
                    (most: local memory of deep (src/model.rs:77) 3 GiB).";
    assert_eq!(line(&not_read), expected);
    assert!(in_use(&not_read)["free_bytes"].is_null() && in_use(&not_read)["rest_bytes"].is_null());
    let not_measured = rejected("rejected-not-measured.capture", None, true);
    let expected = "Device 0 has 141 GiB. Shortly after: free 300 MiB; in use by allocations 79 MiB, by other processes and the \
                    driver 136.64 GiB.";
    assert_eq!(line(&not_measured), expected);
    assert!(in_use(&not_measured)["driver_bytes"].is_null());
    assert_eq!(line(&rejected("rejected-none.capture", None, false)), "Device 0 has 141 GiB.");
    // The same sentence comes before the memory at that moment, and at no other.
    let line = line(&file);
    let sentence = line.strip_prefix("Device 0 has 141 GiB. ").unwrap();
    let at = printed(&["report", "--at", "oom", &file]);
    assert_eq!(at.lines().nth(1), Some(sentence), "{at}");
    assert!(!printed(&["report", "--at", "end", &file]).contains("Shortly after"));
}

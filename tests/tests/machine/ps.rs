//! Tests `gpumem ps`.

use gpumem_tests::Library;

use super::*;

/// Returns the output without the recordings of other tests.
fn without_others(outcome: &Outcome) -> String {
    let lines = outcome.stdout.split_inclusive('\n');
    lines.filter(|line| !line.starts_with("not in the driver's list")).collect()
}

#[test]
fn processes_that_are_not_visible_here_are_not_taken_for_others() {
    // The driver lists the process id of this test, which does not use the driver. The driver therefore means another process.
    let own = std::process::id();
    let machine = Standin::new()
        .set("used=4GiB")
        .set("compute=4000001:300MiB:python train.py")
        .set(format!("compute={own}:1GiB:tool"))
        .set("graphics=4000002:na");
    let outcome = gpumem(&machine, &["ps"]);
    ended(&outcome, 0, &[]);
    without_context(&outcome);
    assert!(!outcome.calls.iter().any(|call| call.contains("cuInit")), "{outcome}");
    let expected = format!(
        "\x20GPU      pid  user  used  for       command
                      MiB
 ───────────────────────────────────────────────────
   0  {own:>7}  -     1024  compute   tool
   not visible here: in a container, on the host, or ended
   0  4000001  -      300  compute   python train.py
   not visible here: in a container, on the host, or ended
   0  4000002  -        -  graphics  -
   not visible here: in a container, on the host, or ended
"
    );
    assert_eq!(without_others(&outcome), expected, "{outcome}");
    let value = json(&gpumem(&machine, &["ps", "--json"]));
    assert_eq!(value["processes"][2]["used_bytes"], Value::Null);
    assert_eq!(value["processes"][0]["recording"]["state"], "unknown");
    // The use of one process is not known, so the sum is not known either.
    assert_eq!(value["gpus"][0]["not_listed_bytes"], Value::Null);
}

#[test]
fn what_is_in_use_and_not_listed_is_said() {
    let machine = Standin::new().set("used=4GiB").set("compute=4000001:1GiB:python");
    let outcome = gpumem(&machine, &["ps"]);
    assert!(outcome.stdout.contains("GPU 0: 4096 MiB in use, of which 3072 MiB by no process above: "), "{outcome}");
    assert_eq!(json(&gpumem(&machine, &["ps", "--json"]))["gpus"][0]["not_listed_bytes"], 3_u64 << 30);
    let outcome = gpumem(&Standin::new().set("processes=empty").set("used=4GiB"), &["ps"]);
    ended(&outcome, 0, &[]);
    assert!(
        outcome.stdout.starts_with("The driver lists no process.\nGPU 0: 4096 MiB in use, of which 4096 MiB"),
        "{outcome}"
    );
}

#[test]
fn lists_that_cannot_be_read() {
    let outcome = gpumem(&Standin::new().without(Library::Nvml), &["ps"]);
    ended(&outcome, 2, &["processes cannot be read: cannot load libnvidia-ml: "]);
    ended(&gpumem(&Standin::new().devices(0), &["ps"]), 2, &["no GPU: "]);
    let rejected =
        Standin::new().devices(2).set("compute=4000001:1MiB").fail("nvmlDeviceGetComputeRunningProcesses_v3[0]=4");
    let outcome = gpumem(&rejected, &["ps"]);
    ended(&outcome, 2, &["the processes on GPU 0 cannot be read: "]);
    assert!(outcome.stdout.contains("\n   1  4000001"), "{outcome}");
    let outcome = gpumem(&Standin::new().devices(2).fail("nvmlDeviceGetHandleByIndex_v2[1]=15"), &["ps"]);
    ended(&outcome, 2, &["GPU 1 cannot be read: "]);
}

#[test]
fn recorded_and_dormant_processes_are_marked() {
    let outcome = script(
        Standin::new(),
        "ps",
        r#"
        ( probe ) > plain.log & plain=$!
        # `exec` keeps the number of the process.
        $gpumem run -o a.capture -- bash -c "echo \$\$ > a.pid; $(declare -f probe); end=$end; probe" > a.log & a=$!
        $gpumem run --dormant -o b.capture -- bash -c "echo \$\$ > b.pid; $(declare -f probe); end=$end; probe" > b.log & b=$!
        for log in plain a b; do until grep -q '&kept' $log.log; do sleep 0.01; done; done
        export GPUMEM_STANDIN="compute=$plain:3MiB,compute=$(cat a.pid):2MiB,compute=$(cat b.pid):1MiB"
        $gpumem ps --json
        GPUMEM_STANDIN= $gpumem ps
        echo > end; wait; cat a.pid
        "#,
    );
    assert_eq!(outcome.exit(), "exit status: 0", "{outcome}");
    let (value, text) = outcome.stdout.split_once("\n}\n").expect("an object");
    let value: Value = serde_json::from_str(&format!("{value}\n}}")).expect("it is JSON");
    let processes = value["processes"].as_array().expect("a list");
    let states: Vec<_> = processes.iter().map(|process| process["recording"]["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["none", "recorded", "dormant"], "{outcome}");
    let file = processes[1]["recording"]["files"][0].as_str().expect("a path");
    let pid = text.lines().last().expect("the number");
    assert!(file.ends_with(&format!("/a.pid{pid}.capture")), "{outcome}");
    assert!(processes.iter().all(|process| process["is_visible"] == true && process["user"].is_string()), "{outcome}");
    assert!(processes[0]["command"].as_str().unwrap().contains("probe call cuInit 0"), "{outcome}");
    // Other tests record other processes at the same time.
    let besides = value["recorded_besides"].as_array().expect("a list");
    let number: u64 = pid.parse().expect("a number");
    assert!(besides.iter().all(|recorded| recorded["pid"] != number), "{outcome}");
    // The driver of a container may list no process.
    let besides = format!("not in the driver's list, but recorded: process {pid}, ");
    assert!(text.contains(&besides) && text.contains(&format!("/a.pid{pid}.capture\n")), "{outcome}");
    // The command is cut because it is long. The file is not cut, because the reader needs it.
    let line = text.lines().find(|line| line.starts_with(&besides)).expect("it is there");
    assert!(line.contains("…, to /"), "{line}");
    let dormant = text.lines().filter(|line| line.contains(", is not recorded until gpumem start "));
    assert!(dormant.count() >= 1, "{outcome}");
}

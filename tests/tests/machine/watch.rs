//! Tests `gpumem watch`. `crates/cli/src/watch/tests.rs` tests its screen.

use gpumem_tests::Library;

use super::*;

#[test]
fn a_line_for_each_reading() {
    let machine = Standin::new().devices(2).set("used=1GiB");
    let outcome = gpumem(&machine, &["watch", "--json", "--count", "3", "--interval", "50ms"]);
    ended(&outcome, 0, &[]);
    without_context(&outcome);
    assert!(!outcome.calls.iter().any(|call| call.contains("cuInit")), "{outcome}");
    let readings: Vec<Value> = outcome.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(readings.len(), 3, "{outcome}");
    for reading in &readings {
        assert_eq!(reading["gpus"][1]["used_bytes"], 1_u64 << 30, "{outcome}");
        assert!(reading["time"].as_f64() > Some(0.0), "{outcome}");
    }
}

#[test]
fn without_a_terminal_or_without_anything_to_show() {
    let outcome = gpumem(&Standin::new(), &["watch"]);
    ended(&outcome, 2, &["`gpumem watch` cannot draw: stdin or stdout is not a terminal; use --json, or `gpumem ps`"]);
    let wrong = gpumem(&Standin::new(), &["watch", "--interval", "0"]);
    assert!(wrong.stderr.contains("it is not a time from 50ms to 3600s"), "{wrong}");
}

/// The command runs on a terminal that `script` creates. It draws there, and the terminal has its old settings at the end, even
/// after a signal.
#[test]
fn the_terminal_is_as_it_was() {
    for ends in ["$gpumem watch --count 2 --interval 50ms", "timeout --foreground -s TERM 5 $gpumem watch"] {
        let line = format!("export gpumem; script -qec 'stty cols 80 rows 24; stty -g; {ends}; stty -g' /dev/null");
        let outcome = script(Standin::new(), "watch-terminal", &line);
        assert_eq!(outcome.exit(), "exit status: 0", "{outcome}");
        let lines: Vec<_> = outcome.stdout.lines().collect();
        let settings = lines.first().expect("a line").trim();
        // The command shows the cursor again after it has left the second screen. The text after that is on the first screen.
        let after = outcome.stdout.rsplit("\x1b[?25h").next().expect("it is one");
        assert_eq!(after.trim(), settings, "{outcome}");
        assert!(settings.contains(':'), "{outcome}");
        let drawn = outcome.stdout.contains("\x1b[?1049h") && outcome.stdout.contains("\x1b[?1049l");
        assert!(drawn && outcome.stdout.contains("Stand-in"), "{outcome}");
    }
}

/// `script` creates a terminal with a shell that controls jobs. Each input waits until something is drawn, for at most ten
/// seconds.
#[test]
fn the_shell_has_the_terminal_while_it_is_stopped() {
    for stops in [r"printf '\x1a'", "kill -TSTP $(cat pid)"] {
        let line = r#"
        export gpumem; > log
        cat > job <<'JOB'
        stty -g
        # `exec` keeps the number of the process.
        bash -c 'echo $$ > pid; exec $gpumem watch --interval 50ms'
        echo stopped=$(stty -g)
        fg
        echo ended=$? $(stty -g)
JOB
        drawn() { for _ in {1..200}; do [ "$(grep -ac "$2" log)" -ge "$1" ] && return; sleep 0.05; done; }
        answer() { drawn 1 Stand-in; STOPS; drawn 1 stopped=; drawn 2 Stand-in; printf q; drawn 1 ended=; }
        answer | script -qefc 'stty cols 80 rows 24; bash -m job' log
        "#;
        let outcome = script(Standin::new(), "watch-stopped", &line.replace("STOPS", stops));
        assert_eq!(outcome.exit(), "exit status: 0", "{outcome}");
        let settings = outcome.stdout.lines().find(|line| line.contains(':')).expect("a line").trim();
        let (before, after) = outcome.stdout.split_once("stopped=").unwrap_or_else(|| panic!("{outcome}"));
        assert!(before.contains("Stand-in") && after.contains("\x1b[?1049h"), "{outcome}");
        let (again, ended) = after.split_once("ended=").unwrap_or_else(|| panic!("{outcome}"));
        assert!(again.contains("Stand-in") && again.contains("\x1b[?1049l"), "{outcome}");
        assert!(ended.starts_with("0 "), "{outcome}");
        // `kill` stops the command at once. Then the shell restores the terminal when the user types into it.
        if stops.starts_with("printf") {
            assert!(before.contains("\x1b[?1049l") && after.starts_with(settings), "{outcome}");
            assert_eq!(ended.trim(), format!("0 {settings}"), "{outcome}");
        }
    }
}

/// The values of a running program are those that its recording has at the end. The program itself is not asked.
#[test]
fn a_program_that_runs() {
    let outcome = script(
        Standin::new(),
        "watch",
        r#"
        $gpumem run -o a.capture -- bash -c "echo \$\$ > a.pid; $(declare -f probe); end=$end; probe" > a.log 2> a.summary & a=$!
        until grep -q '&kept' a.log; do sleep 0.01; done
        # Other tests record meanwhile, and an object of JSON ends at its brace.
        of="a.pid$(cat a.pid).capture\"[^}]*"
        > reading; until grep -q "$of\"used_bytes\":4194304" reading; do $gpumem watch --json --count 1 "$PWD/none.capture" > reading; done
        cat reading a.pid
        # The debug information is read beside it.
        sleep 0.6; $gpumem watch --json --count 1 | grep -o "$of\"seconds\":[0-9.]*" | grep -o '[0-9.]*$' > seconds
        $gpumem watch --json --interval 50ms | grep -m1 -o "$of\"place\":\"[^\"]*raw.rs" > line
        echo > end; wait $a; cat a.summary; echo line $(wc -l < line) $(cat seconds)
        "#,
    );
    let (reading, rest) = outcome.stdout.split_once('\n').expect("a line");
    let reading: Value = serde_json::from_str(reading).expect("it is JSON");
    let (pid, summary) = rest.split_once('\n').expect("a line");
    let recordings = reading["recordings"].as_array().expect("a list");
    let of =
        |end: &str| recordings.iter().find(|of| of["file"].as_str().is_some_and(|file| file.ends_with(end))).cloned();
    let running = of(&format!("/a.pid{pid}.capture")).unwrap_or_else(|| panic!("{outcome}"));
    assert_eq!((running["pid"].to_string().as_str(), &running["is_running"]), (pid, &true.into()), "{outcome}");
    let device = &running["devices"][0];
    assert_eq!((&device["used_bytes"], &device["peak_bytes"]), (&(4 << 20).into(), &(4 << 20).into()), "{outcome}");
    assert_eq!(device["now"][0]["bytes"], 4 << 20, "{outcome}");
    assert!(summary.contains("the peak was 4 MiB"), "{outcome}");
    let (_, line) = summary.split_once("\nline 1 ").unwrap_or_else(|| panic!("{outcome}"));
    // No event happens between the two readings, but the program's clock advances.
    let later: f64 = line.trim().parse().unwrap_or_else(|_| panic!("{outcome}"));
    assert!(later > running["seconds"].as_f64().expect("a number") + 0.5, "{outcome}");
    // A file that the user names and that does not exist is reported.
    let none = of("/none.capture").expect("it is listed");
    assert_eq!((&none["is_running"], none["error"].is_string()), (&false.into(), true), "{outcome}");
}

#[test]
fn recordings_can_be_watched_without_a_gpu() {
    let outcome = script(
        Standin::new(),
        "watch-file",
        r#"
        echo > end; $gpumem run -o a.capture -- bash -c "$(declare -f probe); end=$end; probe" > a.log 2>&1
        GPUMEM_STANDIN_FAIL=nvmlInit_v2=9 $gpumem watch --json --count 1 a.capture; echo "code $?"
        "#,
    );
    let (reading, code) = outcome.stdout.split_once('\n').expect("a line");
    assert_eq!(code, "code 2\n", "{outcome}");
    assert!(
        outcome.stderr.starts_with("gpumem: GPUs cannot be read: libnvidia-ml: nvmlInit_v2 failed with"),
        "{outcome}"
    );
    let reading: Value = serde_json::from_str(reading).expect("it is JSON");
    let recordings = reading["recordings"].as_array().expect("a list");
    let named = recordings.iter().find(|of| of["file"] == "a.capture").expect("it is listed");
    assert_eq!(named["devices"][0]["peak_bytes"], 4 << 20, "{outcome}");
    // Without NVML, the exit code is 2. Whether there is an error message depends on other tests, whose recordings may be shown.
    let nothing = gpumem(&Standin::new().without(Library::Nvml), &["watch", "--json", "--count", "1"]);
    assert_eq!(nothing.exit(), "exit status: 2", "{nothing}");
}

//! Tests `gpumem export`. Tests with Prometheus run only if it is installed on PATH, or by `.ci/run` in `target/prometheus`.

use std::{
    env,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
};

use gpumem_tests::skipped;
use opentelemetry_proto::tonic::{
    collector::metrics::v1::ExportMetricsServiceRequest,
    common::v1::{KeyValue, any_value},
    metrics::v1::{metric, number_data_point},
};
use prost::Message;

use super::*;

/// The functions of the scripts. `program NAME` records a program that has 4 MiB. When the file `go` exists, the program has
/// 1 GiB more for 5 ms, and then fails to allocate 1 TiB. The file `NAME.pid` contains its process id.
const SETUP: &str = r#"
started() { until grep -q "$2" $1; do sleep 0.05; done; }
program() {
    $gpumem run -o $1.capture -- bash -c "echo \$\$ > $1.pid; exec PROBE 'call cuInit 0' 'call cuDevicePrimaryCtxRetain &context 0' \
        'call cuCtxSetCurrent context' 'call cuMemAlloc_v2 &kept 4194304' 'await_file $PWD/go' 'call cuMemAlloc_v2 &large 1073741824' \
        'sleep 5' 'call cuMemFree_v2 large' 'call cuMemAlloc_v2 &huge 1099511627776' 'value kept' 'await_file $end'" > $1.log 2> $1.summary
}
serve() {
    $gpumem export --listen 127.0.0.1:0 "$@" > export.log 2> export.errors & exporter=$!
    started export.log serving
    port=$(sed -n 's|.*http://127.0.0.1:\([0-9]*\)/metrics|\1|p' export.log)
}
request() { exec 3<>/dev/tcp/127.0.0.1/$port; printf "$@" >&3; cat <&3; exec 3>&-; }
scrape() { request "GET /metrics?scraper=$1 HTTP/1.0\r\n\r\n"; }
# What is said of the process of a program. Its reader must read all of it: what has not arrived comes again with the next scrape, and may hide a
# lower peak there.
of() { scrape $2 | grep -a "process_pid=\"$(cat $1.pid)\""; }
"#;

fn exported(machine: Standin, name: &str, lines: &str) -> Outcome {
    let setup = SETUP.replace("PROBE", &built("probe").display().to_string());
    script(machine, &format!("export-{name}"), &format!("{setup}\n{lines}\nkill $exporter; wait"))
}

/// Returns the value of a metric in a section of the output.
#[track_caller]
fn value(outcome: &Outcome, section: &str, metric: &str, label: &str) -> Option<f64> {
    let heading = format!("== {section}\n");
    let (_, text) = outcome.stdout.split_once(&heading).unwrap_or_else(|| panic!("no {section}: {outcome}"));
    let text = text.split("== ").next().unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(&format!("{metric}{{")) && line.contains(label))?;
    line.rsplit(' ').next()?.parse().ok()
}

const MIB_4: f64 = 4_194_304.0;
const GIB_1: f64 = 1_077_936_128.0;

#[test]
fn each_scraper_gets_a_peak_between_two_scrapes_once() {
    let outcome = exported(
        Standin::new(),
        "scrapers",
        r#"
        serve
        program a & program=$!
        started a.log '&kept'
        until of a first | grep -a '^gpumem_process_interval_peak_bytes' > found.txt; do sleep 0.1; done
        echo "== before"; of a first
        touch go; started a.log 'value kept'
        # The recording is in the file after 200 ms at the latest.
        sleep 1; request 'HEAD /metrics?scraper=first HTTP/1.0\r\n\r\n'
        for scrape in first again second; do echo "== $scrape"; of a ${scrape/again/first}; done
        echo > end; wait $program
        until ! of a other | grep -a '^gpumem_process_live' > found.txt; do sleep 0.1; done
        echo "== ended"; of a first
        echo "== gone"; of a first
        "#,
    );
    let is = |section: &str, metric: &str, expected: Option<f64>| {
        let metric = format!("gpumem_process_{metric}");
        assert_eq!(value(&outcome, section, &metric, ""), expected, "{section} {metric}: {outcome}");
    };
    is("before", "interval_peak_bytes", Some(MIB_4));
    is("before", "refused_total", Some(0.0));
    is("first", "interval_peak_bytes", Some(GIB_1));
    is("again", "interval_peak_bytes", Some(MIB_4));
    is("second", "interval_peak_bytes", Some(GIB_1));
    for section in ["first", "again", "second", "ended"] {
        is(section, "peak_bytes", Some(GIB_1));
        is(section, "refused_total", Some(1.0));
        is(section, "retried_total", Some(0.0));
        is(section, "lost_total", Some(0.0));
    }
    is("again", "live_bytes", Some(MIB_4));
    // An ended process has no live series, and each scraper gets its last values once.
    is("ended", "interval_peak_bytes", Some(MIB_4));
    is("ended", "live_bytes", None);
    is("gone", "peak_bytes", None);
    let line = outcome.stdout.lines().find(|line| line.starts_with("gpumem_process_live_bytes{")).expect("a line");
    for label in ["process_command=\"", "process_owner=\"", "hw_id=\"0\"", "gpu_uuid=\"GPU-", "kind=\"device\""] {
        assert!(line.contains(label), "{label}: {line}");
    }
}

/// The peaks that a scraper has to get, whatever happens to the process or to its recording. `slow` scrapes before and after all
/// of it, and `fast` all the time.
///
/// - `killed` aborts right after its peak, and `gpumem run` completes its recording.
/// - `worker` does the same, while the program that started it continues.
/// - `restarted` has its peak after `gpumem stop` and `gpumem start`. So has `removed`, whose first recording is removed in
///   between.
/// - `execed` becomes another program, which has the peak. `became` has its peak right before it becomes another program.
/// - The recording of `gone` is removed right after the peak.
#[test]
fn each_peak_is_in_a_scrape() {
    let bytes = |mib: u64| mib << 20;
    let expected = [
        ("killed", bytes(1604)),
        ("worker", bytes(1704)),
        ("restarted", bytes(5000)),
        ("removed", bytes(5000)),
        ("execed", bytes(4100)),
        ("became", bytes(4204)),
        ("gone", bytes(3004)),
    ];
    let outcome = exported(
        Standin::new(),
        "peaks",
        &r#"
        ulimit -c 0
        serve
        steps() { for step; do echo -n "'$step' "; done; }
        begin=('call cuInit 0' 'call cuDevicePrimaryCtxRetain &context 0' 'call cuCtxSetCurrent context' 'call cuMemAlloc_v2 &kept 4194304')
        # A peak of this many MiB more as soon as the file exists.
        peak() { steps "await_file $PWD/$1" "call cuMemAlloc_v2 &large $(($2 << 20))" 'call cuMemFree_v2 large'; }
        run() {
            local name=$1 options=$2; shift 2
            echo "echo \$\$ > $name.pid; exec $program $(steps "${begin[@]}") $*" > $name.sh
            $gpumem run $options -o $name.capture -- bash $name.sh > $name.log 2> $name.errors
        }
        second() { steps "exec $program & call cuInit 0 & call cuDevicePrimaryCtxRetain &context 0 & call cuCtxSetCurrent context & call cuMemAlloc_v2 &large $(($1 << 20)) & call cuMemFree_v2 large & value large & await_file $end"; }
        run killed '' "$(peak go 1600)" abort &
        echo "echo \$\$ > worker.pid; exec $program $(steps "${begin[@]}") $(peak go 1700) abort" > worker.sh
        $gpumem run -o worker.capture -- bash -c 'bash worker.sh; until [ -e end ]; do sleep 0.1; done' &> worker.log &
        for name in restarted removed; do run $name --dormant "$(peak go 2000)" "$(peak again 5000)" "'value large'" "'await_file $end'" & done
        run execed '' "$(peak go 2000)" "$(second 4100)" &
        run became '' "$(peak go 4200)" "$(second 2000)" &
        run gone '' "$(peak go 3000)" "'value large'" "'await_file $PWD/again'" &
        programs=$(jobs -p | grep -vx $exporter)
        exported() { until [ -e $1.pid ] && of $1 fast > of.txt && grep -q "^gpumem_process_$2" of.txt; do sleep 0.1; done; }
        for name in restarted removed; do started $name.log '&kept'; $gpumem start $(cat $name.pid); exported $name refused_total; done
        for name in killed worker execed became gone; do exported $name live_bytes; done
        scrape slow > before.txt
        (while [ ! -e end ]; do scrape fast >> fast.txt; sleep 0.05; done) & scraper=$!

        touch go
        started gone.log 'value large'; rm gone.pid*.capture
        started restarted.log 'cuMemFree_v2'; started removed.log 'cuMemFree_v2'
        $gpumem stop $(cat restarted.pid); $gpumem start $(cat restarted.pid)
        $gpumem stop $(cat removed.pid); rm removed.pid*.capture; $gpumem start $(cat removed.pid)
        touch again
        for name in restarted removed execed became; do started $name.log 'value large'; done
        # At most a minute.
        has_peak() { grep -aq "^gpumem_process_interval_peak_bytes{process_pid=\"$(cat $1.pid)\".* $2$" fast.txt; }
        for peak in EXPECTED; do
            for _ in {1..600}; do if has_peak ${peak/=/ }; then break; fi; sleep 0.1; done
        done
        scrape slow > slow.txt
        echo > end; wait $scraper $programs
        for name in *.pid; do for scraper in slow fast; do
            echo "== ${name%.pid} $scraper"; grep -a "^gpumem_process_interval_peak_bytes{process_pid=\"$(cat $name)\"" $scraper.txt
        done; done
        "#
        .replace("EXPECTED", &expected.map(|(name, bytes)| format!("{name}={bytes}")).join(" ")),
    );
    let lines: Vec<_> = outcome.stdout.lines().collect();
    let found = expected.map(|(name, _)| {
        ["slow", "fast"].map(|scraper| {
            let section = lines.iter().skip_while(|line| **line != format!("== {name} {scraper}")).skip(1);
            let values = section.take_while(|line| !line.starts_with("== "));
            values.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).max().unwrap_or(0)
        })
    });
    assert_eq!(found, expected.map(|(_, bytes)| [bytes; 2]), "{expected:?}: {outcome}");
}

/// The exporter is stopped while the program runs, so only `gpumem run` can tell it about the recording.
#[test]
fn a_peak_of_a_program_that_no_look_has_found_is_in_a_scrape() {
    let outcome = exported(
        Standin::new(),
        "unseen",
        r#"
        serve
        scrape a > before.txt
        kill -STOP $exporter
        ulimit -c 0
        touch go; echo > end
        program a
        $gpumem run -o killed.capture -- bash -c "echo \$\$ > killed.pid; exec $program 'call cuInit 0' \
            'call cuDevicePrimaryCtxRetain &context 0' 'call cuCtxSetCurrent context' 'call cuMemAlloc_v2 &x 1677721600' abort" &> killed.log
        kill -CONT $exporter
        peaks() { grep -a "^gpumem_process_interval_peak_bytes{process_pid=\"$(cat $1.pid)\"" all.txt; }
        for _ in {1..300}; do scrape a >> all.txt; peaks a > found.txt && peaks killed > found.txt && break; sleep 0.1; done
        for name in a killed; do echo "== $name"; peaks $name; done
        echo "== again"; sleep 1; of a a; of killed a
        "#,
    );
    for (name, bytes) in [("a", GIB_1), ("killed", 1_677_721_600.0)] {
        let value = value(&outcome, name, "gpumem_process_interval_peak_bytes", "");
        assert_eq!(value, Some(bytes), "{name}: {outcome}");
    }
    assert_eq!(value(&outcome, "again", "gpumem_process_interval_peak_bytes", ""), None, "{outcome}");
}

/// With `gpumem run --live`, the file starts over several times while the exporter reads it. No value is lost.
#[test]
fn numbers_of_a_short_recording_are_right_and_do_not_fall() {
    let spikes = Spikes::new();
    let outcome = exported(
        Standin::new(),
        "live",
        &spikes.script(
            r#"
        serve
        live() {
            exec $probe 'call cuInit 0' 'call cuDevicePrimaryCtxRetain &context 0' 'call cuCtxSetCurrent context' \
                'call cuMemAlloc_v2 &huge 1099511627776' STEPS "await_file $end"
        }
        $gpumem run --live --max-size 64KiB -o live.capture -- \
            bash -c "echo \$\$ > live.pid; probe=$program; end=$end; $(declare -f live); live" > live.log 2> live.summary & run=$!
        started live.log cuMemAlloc
        for peak in PEAKS; do
            for _ in {1..200}; do
                of live a | tee -a scrapes | grep -a "^gpumem_process_interval_peak_bytes.* $peak$" > found.txt && break
                sleep 0.05
            done
            touch $peak
        done
        echo "== running"; cat scrapes; echo "== last"; of live a
        kill $exporter; wait $exporter; rm export.log; serve
        echo "== late"; of live a
        echo > end; wait $run; echo "== summary"; cat live.summary
        "#,
        ),
    );
    let values = |metric: &str| -> Vec<u64> {
        let lines = outcome.stdout.lines().filter(|line| line.starts_with(&format!("gpumem_process_{metric}{{")));
        lines.map(|line| line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")).collect()
    };
    let seen = values("interval_peak_bytes");
    assert!(spikes.peaks.iter().all(|peak| seen.contains(peak)), "{outcome}");
    for metric in ["peak_bytes", "refused_total", "retried_total", "lost_total"] {
        let values = values(metric);
        assert!(values.is_sorted() && values.len() > 5, "{metric}: {values:?}\n{outcome}");
    }
    // The process never counts as ended.
    assert_eq!(values("live_bytes").len(), values("peak_bytes").len(), "{outcome}");
    // The file no longer contains the highest peak, so an exporter that starts late has it from the totals.
    #[expect(clippy::cast_precision_loss, reason = "it is small")]
    let highest = Some(spikes.peaks[0] as f64);
    assert_eq!(value(&outcome, "late", "gpumem_process_interval_peak_bytes", ""), highest, "{outcome}");
    for section in ["last", "late"] {
        for (metric, expected) in
            [("live_bytes", spikes.kept), ("peak_bytes", spikes.peaks[0]), ("refused_total", 1), ("lost_total", 0)]
        {
            let value = value(&outcome, section, &format!("gpumem_process_{metric}"), "");
            #[expect(clippy::cast_precision_loss, reason = "it is small")]
            let expected = Some(expected as f64);
            assert_eq!(value, expected, "{section} {metric}: {outcome}");
        }
    }
    assert!(outcome.stdout.contains("events are not in the recording"), "{outcome}");
}

/// The recordings that an exporter hides, and those that it does not hide. They are in one test, because the exporter counts the
/// hidden recordings of the whole machine, and some are hidden only after ten seconds.
///
/// - No file of `full` may become longer than 16 KiB, which is like a full disk for the program. The recording ends there, and
///   the program continues. It has just forked a child, which still has the file open.
/// - The recording of `shorter` becomes shorter.
/// - Another program appends to the recording of `appended`.
/// - `stopped` cannot write, and its values are right.
/// - `other` becomes a program that does not use the driver, and nothing is missing from its recording.
/// - `gpumem stop` has ended the recording of `ended`.
#[test]
fn a_recording_that_cannot_be_followed_is_hidden_and_its_cause_is_said() {
    let outcome = exported(
        Standin::new(),
        "hidden",
        r#"
        # They wait at most a minute. Other recordings of this machine are hidden for a moment, too.
        awaited() { for _ in {1..600}; do eval "$1" > awaited.txt && return; sleep 0.1; done; echo "in vain: $1"; }
        hidden() { awaited "scrape b | grep -a '^gpumem_exporter_hidden{what=\"$2\"} $1'"; }
        exported() { awaited "[ -e $1.pid ] && of $1 b | grep '^gpumem_process_$2'"; }
        said() { awaited "grep 'process $(cat $1.pid) is not exported' export.errors"; }
        about() { grep -a "process_pid=\"$(cat $1.pid)\"" $2; }

        serve
        begin="'call cuInit 0' 'call cuDevicePrimaryCtxRetain &context 0' 'call cuCtxSetCurrent context' 'call cuMemAlloc_v2 &kept 4194304'"
        $gpumem run --dormant -o ended.capture -- bash -c "echo \$\$ > ended.pid; exec $program $begin 'await_file $end'" > ended.log &
        $gpumem run -o other.capture -- bash -c "echo \$\$ > other.pid; exec $program $begin 'await_file $PWD/go' 'exec /bin/sleep & 100'" > other.log &
        {
            echo 'echo $$ > full.pid'
            echo "exec $program $begin 'await_file $PWD/go' \\"
            for _ in {1..1500}; do echo "'call cuMemAlloc_v2 &x $((512 + 512 * RANDOM))' 'call cuMemFree_v2 x' \\"; done
            echo "'fork await_file $end'"
        } > full.sh
        (trap '' XFSZ; ulimit -f 16; unset GPUMEM_STANDIN_LOG; exec $gpumem run -o full.capture -- bash full.sh > /dev/null 2> full.errors) &
        for name in shorter appended stopped; do (program $name) & done
        programs=$(jobs -p | grep -vx $exporter)
        started ended.log '&kept'; $gpumem start $(cat ended.pid); exported ended refused_total
        $gpumem stop $(cat ended.pid); hidden '[1-9]' dormant
        for name in other full shorter appended stopped; do exported $name live_bytes; done
        hidden 0 recording; scrape a > before.txt

        truncate -s 300 shorter.pid$(cat shorter.pid).capture; hidden 1 recording
        # The program writes over a few bytes at once, and its figures go on.
        appended=appended.pid$(cat appended.pid).capture
        printf 'no record' >> $appended; scrape b > seen.txt; touch go
        exported appended 'peak_bytes.* 1077936128$'
        started full.errors 'cannot write the recording'; hidden 2 recording
        scrape a > first.txt
        echo "== before"; about full before.txt
        echo "== full"; about full first.txt
        for name in shorter appended other; do echo "== $name"; about $name first.txt; done

        exported stopped 'peak_bytes.* 1077936128$'; kill -STOP $(cat stopped.pid)
        head -c 1000000 /dev/zero | tr '\0' x >> $appended; hidden 3 recording
        echo "== damaged"; of appended a
        for name in full shorter appended; do said $name; done; exported stopped live_bytes; hidden 3 recording
        echo "== silent"; of appended a
        # The child of `full` may still write, so its last figures were handed over several times.
        scrape a > last.txt; echo "== again"; about full last.txt
        for name in *.pid; do kill -0 $(cat $name) || echo "in vain: $name"; done; cp export.errors said
        # An exporter that begins later knows them, too.
        kill $exporter; wait $exporter; rm export.log; serve; hidden 3 recording

        kill $(cat full.pid); hidden 2 recording
        kill -CONT $(cat stopped.pid); kill $(cat other.pid); echo > end; wait $programs
        echo "== log"; for name in *.pid; do grep "process $(cat $name)" said; done
        echo "== summary"; cat shorter.summary
        "#,
    );
    assert!(!outcome.stdout.contains("in vain: "), "{outcome}");
    let value_of = |section, metric| value(&outcome, section, &format!("gpumem_process_{metric}_bytes"), "");
    assert_eq!(value_of("before", "live"), Some(MIB_4), "{outcome}");
    assert_eq!(value_of("appended", "interval_peak"), Some(GIB_1), "{outcome}");
    for section in ["full", "again", "shorter", "other", "damaged", "silent"] {
        assert_eq!(value_of(section, "live"), None, "{section}: {outcome}");
    }
    // The last values of a recording that broke off are exported.
    assert!(value_of("full", "peak") >= Some(MIB_4), "{outcome}");
    for section in ["again", "damaged", "silent"] {
        assert_eq!(value_of(section, "peak"), None, "{section}: {outcome}");
    }
    let (_, log) = outcome.stdout.split_once("== log\n").expect("there is one");
    let (log, summary) = log.split_once("== summary\n").expect("it is last");
    assert_eq!(log.lines().count(), 3, "{outcome}");
    for cause in ["it contains nothing new; ", "it has become shorter; ", "it is damaged at byte "] {
        assert_eq!(log.matches(&format!(" is not exported: {cause}")).count(), 1, "{cause}: {outcome}");
    }
    assert_eq!(summary.matches(", or the file was made shorter, replaced, moved or removed; ").count(), 1, "{outcome}");
}

#[test]
fn what_the_driver_says() {
    let outcome = exported(
        Standin::new()
            .devices(2)
            .set("mig=1")
            .set("used=1GiB")
            .set("accounted=3GiB")
            .set("compute=4000001:300MiB:python train.py")
            .set("graphics=4000002:na"),
        "driver",
        r#"
        serve
        echo "== all"; scrape a
        "#,
    );
    let is = |metric: &str, label: &str, expected: Option<f64>| {
        assert_eq!(value(&outcome, "all", metric, label), expected, "{metric} {label}: {outcome}");
    };
    let gib = f64::from(1 << 30);
    is("hw_gpu_memory_limit_bytes", "hw_id=\"0\"", Some(16.0 * gib));
    is("hw_gpu_memory_limit_bytes", "hw_id=\"1\"", Some(17.0 * gib));
    is("hw_gpu_memory_limit_bytes", "hw_id=\"0:0\",", Some(8.0 * gib));
    is("hw_gpu_memory_usage_bytes", "hw_id=\"1\"", Some(gib));
    is("hw_gpu_memory_utilization_ratio", "hw_id=\"0\"", Some(1.0 / 16.0));
    is("gpumem_gpu_memory_reserved_bytes", "hw_id=\"0\"", Some(f64::from(615 << 20)));
    is("gpumem_process_usage_bytes", "process_pid=\"4000001\"", Some(f64::from(300 << 20)));
    is("gpumem_process_accounted_peak_bytes", "process_pid=\"4000001\"", Some(3.0 * gib));
    // A value that the driver does not know is left out.
    is("gpumem_process_usage_bytes", "process_pid=\"4000002\"", None);
    is("gpumem_exporter_hidden", "what=\"process\"", Some(4.0));
    assert!(outcome.stdout.contains("hw_parent=\"0\""), "{outcome}");
    // A failed reading of the driver is reported.
    let outcome = exported(
        Standin::new().fail("nvmlDeviceGetMemoryInfo_v2[0]=15"),
        "failing",
        "serve; cat export.log; echo '== all'; scrape a",
    );
    assert!(outcome.stdout.contains("gpumem export: 1 reading of the driver has failed"), "{outcome}");
    assert_eq!(value(&outcome, "all", "hw_gpu_memory_usage_bytes", ""), None, "{outcome}");
    assert_eq!(value(&outcome, "all", "gpumem_exporter_hidden", "what=\"reading\""), Some(1.0), "{outcome}");
}

#[test]
fn others_need_a_token_or_the_socket() {
    let outcome = exported(
        Standin::new(),
        "access",
        r#"
        for address in 0.0.0.0:0 0:0 nowhere.invalid:0 localhost; do $gpumem export --listen $address; echo "code $?"; done
        $gpumem export --listen localhost:0 > name.log & exporter=$!
        started name.log 'serving http://127.0.0.1:[1-9]'; kill $exporter; wait $exporter
        echo short > short; $gpumem export --token-file short; echo "code $?"
        echo 0123456789abcdef0123 > token
        serve --token-file token
        status() { request "$@" | head -1; }
        status 'GET /metrics HTTP/1.0\r\n\r\n'
        status 'GET /metrics HTTP/1.0\r\nAuthorization: Bearer 0123456789abcdef0124\r\n\r\n'
        status 'GET /metrics HTTP/1.0\r\nAuthorization: Bearer 0123456789abcdef0123\r\n\r\n'
        status 'GET /metrics HTTP/1.0\r\nAuthorization: bearer  0123456789abcdef0123\r\n\r\n'
        status 'GET /metrics HTTP/1.0\r\nAuthorization: Basic 0123456789abcdef0123\r\n\r\n'
        status 'GET /other HTTP/1.0\r\nAuthorization: Bearer 0123456789abcdef0123\r\n\r\n'
        status 'POST /metrics HTTP/1.0\r\nAuthorization: Bearer 0123456789abcdef0123\r\n\r\n'
        request 'HEAD /metrics HTTP/1.0\r\nAuthorization: Bearer 0123456789abcdef0123\r\n\r\n' | grep -v '^date'
        status 'nonsense\r\n\r\n'
        request 'GET /metrics HTTP/1.1\r\nHost: evil.example:9837\r\nAuthorization: Bearer 0123456789abcdef0123\r\n\r\n' | grep -v '^date\|^content-length'
        $gpumem export --listen 127.0.0.1:$port; echo "code $?"
        kill $exporter; wait $exporter; rm export.log
        wrong() { $gpumem export --token-file $1; echo "code $?"; }
        mkfifo pipe; wrong pipe; wrong /dev/zero; wrong <(yes); wrong <(head -c 10000 /dev/zero | tr '\0' x)
        serve --host gpu.monitoring.svc --token-file <(cat token)
        for host in gpu.monitoring.svc localhost other.monitoring.svc; do
            curl -s -o answer.txt -w '%{http_code}\n' -H "Host: $host" -H "$(sed 's/^/Authorization: Bearer /' token)" http://127.0.0.1:$port/metrics
        done
        kill $exporter; wait $exporter
        for round in 1 2; do
            $gpumem export --unix socket > unix.log & exporter=$!
            started unix.log serving; stat -c %a socket
            # A socket that nobody listens on is replaced.
            [ $round = 1 ] && { kill -9 $exporter; wait $exporter; rm unix.log; }
        done
        curl -s --unix-socket socket http://x/metrics | grep -c '^hw_gpu_memory_limit_bytes'
        "#,
    );
    let (rejected, stderr) = (outcome.stdout.matches("code 2\n").count(), &outcome.stderr);
    assert_eq!(rejected, 10, "{outcome}");
    for text in [
        "gpumem: `pipe` cannot be used: it is not a regular file; pass a file that contains a token",
        "gpumem: cannot listen on 0.0.0.0:0: other machines can reach it, and there is no token; pass --token-file FILE, or --unix SOCKET",
        "gpumem: cannot listen on 0:0: other machines can reach it, and there is no token; pass --token-file FILE, or --unix SOCKET",
        "gpumem: cannot listen on nowhere.invalid:0: failed to lookup address information",
        "gpumem: cannot listen on localhost: invalid socket address; use another --listen ADDRESS:PORT",
        "gpumem: `short` cannot be used: it must contain one line of at least 16 characters; pass a file that contains a token",
        "gpumem: `/dev/zero` cannot be used: it is not a regular file; pass a file that contains a token",
        " cannot be used: it has more than 4096 bytes; pass a file that contains a token",
        ": Address already in use (os error 98); another process may listen there; use another --listen",
    ] {
        assert!(stderr.contains(text), "{text}: {outcome}");
    }
    let lines: Vec<_> =
        outcome.stdout.lines().filter(|line| !line.starts_with("code") && !line.is_empty()).map(str::trim).collect();
    let status = |code: &str| format!("HTTP/1.0 {code}");
    let expected = [
        status("401 Unauthorized"),
        status("401 Unauthorized"),
        status("200 OK"),
        status("200 OK"),
        status("401 Unauthorized"),
        status("404 Not Found"),
        status("404 Not Found"),
        status("200 OK"),
        "content-type: text/plain; version=0.0.4".to_owned(),
        "HTTP/1.1 400 Bad Request".to_owned(),
        "HTTP/1.1 403 Forbidden".to_owned(),
        "content-type: text/plain; charset=utf-8".to_owned(),
        "connection: close".to_owned(),
        "gpumem export does not answer to the name `evil.example`: start it with --host evil.example".to_owned(),
        "200".to_owned(),
        "200".to_owned(),
        "403".to_owned(),
        "660".to_owned(),
        "660".to_owned(),
        "1".to_owned(),
    ];
    assert_eq!(lines, expected, "{outcome}");
}

/// 300 connections that send no request make room for one that sends a request.
#[test]
fn a_scrape_does_not_wait_for_connections_without_a_request() {
    let outcome = exported(
        Standin::new(),
        "half-open",
        r"
        serve
        for number in {1..300}; do exec {open}<>/dev/tcp/127.0.0.1/$port; printf 'GET /metrics' >&$open; done
        began=${EPOCHREALTIME/./}
        scrape a | grep -ac '^hw_gpu_memory_limit_bytes'
        echo $((${EPOCHREALTIME/./} - began))
        ",
    );
    let numbers: Vec<u64> = outcome.stdout.lines().filter_map(|line| line.parse().ok()).collect();
    // The scrape takes 20 ms, and some seconds on a busy machine. The connections may stay open for 10 s without a request.
    assert!(matches!(numbers[..], [1, micros] if micros < 6_000_000), "{outcome}");
}

/// Returns the Prometheus program that checks metrics and rules.
fn promtool() -> Option<PathBuf> {
    let unpacked = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/prometheus/usr/bin");
    let paths = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&paths).chain([unpacked]);
    let found = folders.map(|folder| folder.join("promtool")).find(|path| path.is_file());
    if found.is_none() {
        skipped("no promtool: for example `apt-get install prometheus`");
    }
    found
}

#[test]
fn promtool_accepts_the_metrics() {
    let Some(promtool) = promtool() else { return };
    let lines = format!(
        "promtool={}\n{}",
        promtool.display(),
        r#"
        serve
        program a & program=$!
        started a.log '&kept'
        touch go; started a.log 'value kept'
        until of a check | grep -a '^gpumem_process_refused' > found.txt; do sleep 0.1; done
        scrape check | sed '1,/^\r$/d' > metrics.txt
        echo "== check"; $promtool check metrics < metrics.txt 2>&1
        echo "== end"; echo > end; wait $program
        "#
    );
    let outcome = exported(Standin::new(), "promtool", &lines);
    assert!(outcome.stdout.contains("== check\n== end\n"), "{outcome}");
}

#[test]
fn the_rules_and_the_queries_of_the_dashboard_are_right() {
    let Some(promtool) = promtool() else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/prometheus");
    let run = |arguments: &[&std::ffi::OsStr]| {
        let output =
            std::process::Command::new(&promtool).args(arguments).current_dir(&folder).output().expect("it starts");
        let text = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&text));
    };
    run(&["check", "rules", "rules.yml"].map(AsRef::as_ref));
    run(&["test", "rules", "rules.test.yml"].map(AsRef::as_ref));
    // Each query of the dashboard becomes a rule.
    let dashboard = std::fs::read_to_string(folder.join("dashboard.json")).expect("it is there");
    let dashboard: Value = serde_json::from_str(&dashboard).expect("it is JSON");
    let targets =
        dashboard["panels"].as_array().expect("a list").iter().filter_map(|panel| panel["targets"].as_array());
    let query = |target: &Value| {
        let query = target["expr"].as_str().expect("a query").replace("$__range", "1h");
        query.replace("$__rate_interval", "5m").replace("$instance", ".*")
    };
    let queries: Vec<_> = targets.flatten().map(query).collect();
    assert!(queries.len() >= 8 && !queries.iter().any(|query| query.contains('$')), "{queries:?}");
    let rules: Vec<_> = queries
        .iter()
        .map(|query| serde_json::json!({"record": "x:y", "expr": query}))
        .enumerate()
        .map(|(at, mut rule)| {
            rule["labels"] = serde_json::json!({"at": at.to_string()});
            rule
        })
        .collect();
    let file = |name: &str, content: Value| {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&file, content.to_string()).expect("it can be written");
        file
    };
    let rules = file("dashboard-queries.yml", serde_json::json!({"groups": [{"name": "dashboard", "rules": rules}]}));
    run(&["check".as_ref(), "rules".as_ref(), rules.as_os_str()]);
    // One process of a pod replaces another one. The two processes never have the memory at the same time.
    let of_pods = queries.iter().find(|query| query.contains("k8s_pod_uid")).expect("a panel of pods");
    let process = |pid: u32, values: &str| {
        let of = format!("instance='node', gpu_uuid='GPU-1', k8s_pod_uid='a', process_pid='{pid}'");
        serde_json::json!({"series": format!("gpumem_process_interval_peak_bytes{{{of}}}"), "values": values})
    };
    let limit = "hw_gpu_memory_limit_bytes{instance='node', gpu_uuid='GPU-1', hw_id='0'}";
    let test = serde_json::json!({
        "interval": "1m",
        "input_series": [
            process(1, "1e10x3 stale"),
            process(2, "_x4 1e10x15"),
            {"series": limit, "values": "2e10x20"},
        ],
        "promql_expr_test": [{
            "expr": of_pods,
            "eval_time": "10m",
            "exp_samples": [{"labels": "{instance='node', gpu_uuid='GPU-1', k8s_pod_uid='a', hw_id='0'}", "value": 0.5}],
        }],
    });
    let test = file("dashboard-test.yml", serde_json::json!({"tests": [test]}));
    run(&["test".as_ref(), "rules".as_ref(), test.as_os_str()]);
}

/// Starts an OpenTelemetry collector. Returns its port, and a channel with the requests that were pushed to it.
fn collector() -> (u16, mpsc::Receiver<ExportMetricsServiceRequest>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let port = listener.local_addr().expect("it has one").port();
    let (to, pushed) = mpsc::channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let body = answered(stream.expect("it connects"));
            let request = ExportMetricsServiceRequest::decode(&*body).expect("it is what OTLP has");
            if to.send(request).is_err() {
                break;
            }
        }
    });
    (port, pushed)
}

/// Reads a request and answers it. Returns the body.
fn answered(mut stream: TcpStream) -> Vec<u8> {
    let (mut read, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        let more = stream.read(&mut buffer).expect("it can be read");
        read.extend_from_slice(&buffer[..more]);
        let text = String::from_utf8_lossy(&read).to_ascii_lowercase();
        let Some((head, _)) = text.split_once("\r\n\r\n") else { continue };
        assert!(head.starts_with("post /v1/metrics "), "{head}");
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("it has a length");
        let content_at = head.len() + 4;
        if read.len() >= content_at + length.trim().parse::<usize>().expect("a number") {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                .expect("it can be written");
            return read.split_off(content_at);
        }
    }
}

fn text_of(attributes: &[KeyValue], key: &str) -> Option<String> {
    let value = attributes.iter().find(|of| of.key == key)?.value.clone()?.value?;
    let any_value::Value::StringValue(text) = value else { return None };
    Some(text)
}

/// Returns the values of a metric, with the attributes of each.
fn pushed_values(request: &ExportMetricsServiceRequest, name: &str) -> Vec<(Vec<KeyValue>, f64)> {
    let metrics = request.resource_metrics.iter().flat_map(|of| &of.scope_metrics).flat_map(|of| &of.metrics);
    let data = metrics.filter(|metric| metric.name == name).filter_map(|metric| metric.data.clone());
    let points = data.flat_map(|data| match data {
        metric::Data::Gauge(gauge) => gauge.data_points,
        metric::Data::Sum(sum) => sum.data_points,
        _ => Vec::new(),
    });
    #[expect(clippy::cast_precision_loss, reason = "they are small")]
    let value = |value| match value {
        number_data_point::Value::AsDouble(value) => value,
        number_data_point::Value::AsInt(value) => value as f64,
    };
    points.filter_map(|point| Some((point.attributes, value(point.value?)))).collect()
}

#[test]
fn a_collector_of_opentelemetry_gets_the_same() {
    let (port, pushed) = collector();
    let lines = format!(
        "serve --otlp http://127.0.0.1:{port}\n{}",
        r#"
        program a & program=$!
        started a.log '&kept'
        # A push comes every 100 ms.
        until of a scraper | grep -a '^gpumem_process_live' > found.txt; do sleep 0.1; done
        sleep 0.5; touch go; started a.log 'value kept'
        until of a scraper | grep -a '^gpumem_process_peak_bytes.* 1077936128$' > found.txt; do sleep 0.1; done
        sleep 0.5; echo "== all"; of a scraper
        echo > end; wait $program
        until ! of a other | grep -a '^gpumem_process_live' > found.txt; do sleep 0.1; done
        # Later pushes come within this time, also on a busy machine.
        sleep 3; cat a.pid
        "#
    );
    let machine = Standin::new().env("OTEL_METRIC_EXPORT_INTERVAL", "100");
    let outcome = exported(machine, "otlp", &lines);
    let pid = outcome.stdout.lines().last().expect("a line").to_owned();
    let pushed: Vec<_> = pushed.try_iter().collect();
    // Returns the value of the process in each push. `None` if a push has none.
    let values = |name: &str| -> Vec<Option<f64>> {
        let of_push = |request| {
            let all = pushed_values(request, name).into_iter();
            all.filter(|(of, _)| text_of(of, "process.pid").as_ref() == Some(&pid)).map(|(_, value)| value).next()
        };
        pushed.iter().map(of_push).collect()
    };
    let peaks = values("gpumem.process.interval.peak");
    // On a busy machine, the memory may be in use at two pushes in a row. Later pushes do not have it.
    let mut is_high: Vec<_> = peaks.iter().flatten().map(|peak| *peak == GIB_1).collect();
    is_high.dedup();
    assert_eq!(is_high.iter().filter(|is_high| **is_high).count(), 1, "{peaks:?}");
    assert!(peaks.iter().flatten().any(|peak| *peak == MIB_4), "{peaks:?}");
    for (name, prometheus) in [
        ("gpumem.process.live", "gpumem_process_live_bytes"),
        ("gpumem.process.peak", "gpumem_process_peak_bytes"),
        ("gpumem.process.refused", "gpumem_process_refused_total"),
    ] {
        let latest = values(name).into_iter().flatten().last();
        assert_eq!(latest, value(&outcome, "all", prometheus, ""), "{name}: {outcome}");
    }
    // An ended process is not pushed any more.
    assert_eq!(values("gpumem.process.live").last(), Some(&None), "{outcome}");
    let latest = pushed.last().expect("some were pushed");
    let limits = pushed_values(latest, "hw.gpu.memory.limit");
    assert_eq!((limits.len(), limits[0].1), (1, 16.0 * f64::from(1 << 30)));
    assert_eq!(text_of(&limits[0].0, "hw.id").as_deref(), Some("0"));
    let resource = latest.resource_metrics[0].resource.as_ref().expect("there is one");
    assert_eq!(text_of(&resource.attributes, "service.name").as_deref(), Some("gpumem-export"));
    assert!(outcome.stdout.len() > 100 && !outcome.stderr.contains("cannot be pushed"), "{outcome}");
    let rejected = exported(
        Standin::new(),
        "otlp-wrong",
        "$gpumem export --listen 127.0.0.1:0 --otlp https://x; exporter=1000000000",
    );
    assert!(
        rejected.stderr.contains(
            "cannot push to `https://x`: it does not start with http://, and there is no TLS; pass http://localhost:4318"
        ),
        "{rejected}"
    );
    assert!(!rejected.stdout.contains("serving"), "{rejected}");
}

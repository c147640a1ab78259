//! Tests hostile names of processes, files and commands, on a terminal and in JSON. `crates/cli/tests/command/names.rs` tests
//! hostile names in recordings.

use std::path::Path;

use gpumem_core::testing::{assert_printable, has};

use super::*;

const NAME: &str =
    "x\u{1b}[31m\u{7}\r\t\u{7f}\u{85}\u{9b}2J\u{200b}\u{200e}\u{2028}\u{202e}\u{2066}\u{feff}|`;<b>\"'\\\nFORGED: y";

#[test]
fn programs_that_run_cannot_write_to_the_terminal_by_their_names() {
    let outcome = script(
        Standin::new().env("NAME", NAME),
        "names",
        r#"
        mkdir "$NAME"; d=$(declare -f probe); d=${d/exec /exec -a \"\$NAME\" }
        start() { $gpumem run "${@:2}" -- bash -c "echo \$\$ > $1.pid; $d; end=$end; probe" "$NAME" > $1.log 2> $1.text & }
        start recorded -o "$NAME/$NAME.capture"; start dormant --dormant -o "$NAME/$NAME-2.capture"
        for name in recorded dormant; do until grep -aq '&kept' $name.log; do sleep 0.01; done; done
        export GPUMEM_STANDIN="compute=4000001:300MiB:$NAME,compute=$(cat recorded.pid):1MiB"
        $gpumem ps > ps.text; $gpumem ps --json > ps.json; $gpumem info > info.text; $gpumem doctor > doctor.text
        $gpumem watch --json --count 1 > watch.json
        export GPUMEM_STANDIN= GPUMEM_STANDIN_FAIL=nvmlInit_v2=9
        $gpumem ps > alone.text 2> why.text; echo $? > code; $gpumem ps --json > alone.json 2> why-json.text
        $gpumem start $(cat dormant.pid) > start.text 2>&1; $gpumem stop $(cat dormant.pid) --json > stop.json
        echo > end; wait
        for file in *.text *.json code dormant.pid; do echo "== $file"; cat $file; done
        "#,
    );
    let parts: Vec<_> = outcome.stdout.split("== ").skip(1).filter_map(|part| part.split_once('\n')).collect();
    assert_eq!(parts.len(), 15, "{outcome}");
    let part = |name: &str| parts.iter().find(|(part, _)| *part == name).map(|(_, text)| *text).expect("it is there");
    for (name, text) in &parts {
        assert!(!text.trim().is_empty(), "{name}: {outcome}");
        assert_printable(text);
        if Path::new(name).extension().is_some_and(|extension| extension == "json") {
            let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}: {text}"));
            assert!(has(&value, NAME), "{name}: {text}");
        }
    }
    assert!(
        part("ps.text").contains("x\\u{1b}[31m") && part("recorded.text").contains("\nMore: gpumem report "),
        "{outcome}"
    );
    // Recorded and dormant processes are known without the driver's list. A line reports that the list is missing.
    let dormant = part("dormant.pid").trim();
    let waits = format!(", is not recorded until gpumem start {dormant}\n");
    assert!(
        part("alone.text").contains(&waits) && part("alone.text").contains(", but recorded: process "),
        "{outcome}"
    );
    assert!(part("why.text").starts_with("gpumem: processes cannot be read: ") && part("code") == "2\n", "{outcome}");
}

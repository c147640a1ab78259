//! Tests the output of the commands on terminals that are not 80 columns wide.

use unicode_width::UnicodeWidthStr;

use super::*;

fn machine() -> Standin {
    Standin::new().devices(2).set("used=4GiB").set(format!("compute=4000001:300MiB:python {}", "train.py ".repeat(20)))
}

#[test]
fn no_line_is_longer_than_the_terminal_is_wide() {
    for command in ["info", "ps", "doctor"] {
        let outcome = gpumem(&machine().env("COLUMNS", "60"), &[command]);
        assert!(outcome.stdout.lines().count() > 3, "{outcome}");
        for line in outcome.stdout.lines() {
            // A line that contains only a path is not broken.
            assert!(line.width() <= 60 || !line.trim().contains(' '), "{line}\n{outcome}");
        }
    }
}

#[test]
fn the_width_is_that_of_the_terminal() {
    let [narrow, wide] = [50, 120].map(|columns| {
        let line = format!("script -qec 'stty cols {columns} rows 24; NO_COLOR=1 '$gpumem' ps' /dev/null");
        let outcome = script(machine(), &format!("width-{columns}"), &line);
        assert_eq!(outcome.exit(), "exit status: 0", "{outcome}");
        let line = outcome.stdout.lines().find(|line| line.contains("4000001")).unwrap_or_else(|| panic!("{outcome}"));
        line.trim_end().width()
    });
    assert!(narrow <= 50, "{narrow}");
    assert!((100..=120).contains(&wide), "{wide}");
}

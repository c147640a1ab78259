//! Tests the recipes of the book's page about CI. A shell runs each of their lines, as a runner does.

use std::os::unix::fs::PermissionsExt;

use gpumem_tests::built;

use super::*;

/// Returns the lines that a runner gives to a shell.
fn lines(recipe: &str) -> Vec<String> {
    let mut is_script = false;
    let shell = |line: &str| {
        let (line, step) = (line.trim(), line.trim().strip_prefix("- "));
        if let Some(run) = step.unwrap_or(line).strip_prefix("run: ") {
            return Some(run.replace("${{ github.event.number }}", "7"));
        }
        let is_step = is_script && step.is_some();
        is_script = line == "script:" || is_step;
        step.filter(|_| is_step).map(str::to_owned)
    };
    recipe.lines().filter_map(shell).collect()
}

fn recipes() -> [Vec<String>; 2] {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/book/src/ci.md");
    let page = fs::read_to_string(page).expect("the page is there");
    let recipes = page.split("```yaml\n").skip(1).map(|rest| lines(rest.split("```").next().unwrap_or_default()));
    recipes.collect::<Vec<_>>().try_into().expect("there is one for GitHub, and one for GitLab")
}

/// A checkout on a runner with the programs `gpumem`, `python`, `torchrun` and `gh`.
struct Runner(Folder);

impl Runner {
    fn new() -> Self {
        let folder = Folder::new();
        let bin = folder.0.path().join("bin");
        fs::create_dir_all(&bin).expect("it can be made");
        // The program needs more memory if the file `grown` exists.
        let train = |mib: u32| {
            let more = format!("call cuMemAlloc_v2 &more {}", mib << 20);
            format!("exec {}{}", probe(), in_shell(&[&ALLOCATES[..], &[&more]].concat()))
        };
        let python = format!("if [ -e grown ]; then {}; else {}; fi", train(200), train(64));
        let torchrun = "RANK=0 python train.py & RANK=1 python train.py; wait";
        for (name, script) in [("python", &*python), ("torchrun", torchrun), ("gh", "echo \"$@\"; cat comment.md")] {
            let file = bin.join(name);
            fs::write(&file, format!("#!/bin/sh\n{script}\n")).expect("it can be written");
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("it is ours");
        }
        std::os::unix::fs::symlink(built("gpumem-command"), bin.join("gpumem")).expect("it can be made");
        Self(folder)
    }

    fn run(&self, line: &str, exit: i32) -> Outcome {
        let script = format!("cd {}; PATH=$PWD/bin:$PATH\n{line}", self.0.0.path().display());
        let outcome = machine().run_program("/bin/bash".as_ref(), &["-e", "-c", &script]);
        assert_eq!(outcome.exit(), format!("exit status: {exit}"), "{line}: {outcome}");
        outcome
    }

    fn text(&self, file: &str) -> String {
        fs::read_to_string(self.0.file(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
    }

    /// Makes later runs of the program need more memory.
    fn grow(&self) {
        fs::write(self.0.file("grown"), "").expect("it can be written");
    }
}

#[test]
fn the_recipe_for_github() {
    let [lines, _] = recipes();
    let [run, check, comment] = lines.as_slice() else { panic!("{lines:?}") };
    let runner = Runner::new();
    runner.run(run, 0);
    runner.run("gpumem baseline write peaks.json train.capture", 0);
    runner.run(check, 0);
    runner.grow();
    runner.run(run, 0);
    let grown = runner.run(check, 1);
    assert!(grown.stderr.contains("title=GPU memory::train, device 0: the peak was 68 MiB and is 204 MiB"), "{grown}");
    let posted = runner.run(comment, 0).stdout;
    assert!(
        posted.starts_with("pr comment 7 --body-file comment.md\n### GPU memory\n\n| higher peak of | before |"),
        "{posted}"
    );
    assert!(posted.contains("\n| `train, device 0` | 68 MiB | 204 MiB | +136 MiB (+200.0 %) |\n"), "{posted}");
    let above = runner.run(&run.replace("20GiB", "200MiB"), 1);
    let error = "title=GPU memory::train.capture: the peak of device 0 was 204 MiB, 4 MiB above the limit of 200 MiB";
    assert!(above.stderr.lines().any(|line| line.starts_with("::error ") && line.ends_with(error)), "{above}");
}

#[test]
fn the_recipe_for_gitlab() {
    let [_, lines] = recipes();
    let [folder, run, report, check] = lines.as_slice() else { panic!("{lines:?}") };
    let runner = Runner::new();
    for line in [folder, run, report] {
        runner.run(line, 0);
    }
    runner.run("gpumem baseline write peaks.json runs/", 0);
    let peaks = runner.text("peaks.json");
    assert!(
        peaks.contains("\"train.rank0, device 0\": \"68 MiB\"") && peaks.contains("\"train.rank1, device 0\""),
        "{peaks}"
    );
    runner.run(check, 0);
    runner.grow();
    runner.run(&format!("rm -r runs; {folder}; {run}"), 0);
    runner.run(check, 1);
    runner.run(&report.replace("20GiB", "200MiB"), 1);
    for (file, failures) in [("limits.xml", 2), ("peaks.xml", 5)] {
        let text = runner.text(file);
        assert!(text.contains(&format!("failures=\"{failures}\"")), "{file}: {text}");
    }
}

/// If another recording is moved to the path of a process's recording, the process's own recording is lost.
#[test]
fn a_recording_that_another_one_replaced_is_a_loss() {
    let folder = Folder::new();
    let [gpumem, probe] = ["gpumem-command", "probe"].map(|name| built(name).display().to_string());
    let steps = in_shell(&[&ALLOCATES[..], &["await_file end"]].concat());
    let text = format!(
        "cd {folder}
         {gpumem} run -o other -- {probe}{first} > /dev/null 2>&1
         {gpumem} run -o a.capture --fail-if lost -- sh -c \"{probe}{steps} & pid=\\$!
             until [ -s a.pid\\$pid.capture ]; do sleep 0.01; done; cp other copy; mv copy a.pid\\$pid.capture; > end
             wait \\$pid; true\" > /dev/null 2> errors
         code=$?; cat errors; exit $code",
        folder = folder.0.path().display(),
        first = in_shell(&ALLOCATES),
    );
    let outcome = machine().run_program("/bin/bash".as_ref(), &["-c", &text]);
    assert_eq!(outcome.exit(), "exit status: 1", "{outcome}");
    assert!(outcome.stdout.contains("or the file was made shorter, replaced, moved or removed"), "{outcome}");
}

/// A recording that is missing must not pass as a recording without losses.
#[test]
fn a_recording_that_was_removed_is_a_loss() {
    for last in [&["await_file end"][..], &["await_file end", "until_killed 0 0"]] {
        let folder = Folder::new();
        let [gpumem, probe] = ["gpumem-command", "probe"].map(|name| built(name).display().to_string());
        let [first, second] = [&[][..], last].map(|last| in_shell(&[&ALLOCATES[..], last].concat()));
        let text = format!(
            "cd {folder}
             {gpumem} run -o a.capture --fail-if lost -- sh -c \"{probe}{first}; {probe}{second} & pid=\\$!
                 until [ -s a.pid\\$pid.capture ]; do sleep 0.01; done; rm a.pid\\$pid.capture; > end
                 wait \\$pid; true\" > /dev/null 2> errors
             code=$?; rm -f end; cat errors; exit $code",
            folder = folder.0.path().display(),
        );
        let outcome = machine().run_program("/bin/bash".as_ref(), &["-c", &text]);
        assert_eq!(outcome.exit(), "exit status: 1", "{outcome}");
        assert!(outcome.stdout.contains("or the file was made shorter, replaced, moved or removed"), "{outcome}");
        assert_eq!(folder.names(), ["a.capture", "errors"], "{outcome}");
    }
}

//! Shows a recording.

use std::{
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
};

use clap::Args;
use gpumem_core::{
    export::{InPaint, Paint, Role},
    model::one_line,
};
use serde::Serialize;

use crate::{
    exit::Exit,
    failure::Failure,
    files::{self, Recordings},
    formats::Format,
    history::{AskedMoment, History, Moment},
    page::{self, Page},
    progress::working,
    recording::complete_for_report,
    report::{
        calls::{self, AllCalls, CallOptions},
        json,
        limit::{Judge, Limits},
        moment,
        overview::{Missing, NotFreed, Overview},
        places, process, summary, tensors,
    },
    terminal,
};

const EXAMPLES: &str = "\
Examples:
  gpumem report train.capture                      the peak, its parts, and memory that was not freed
  gpumem report --tree train.capture               each scope: peak, still in use, total
  gpumem report --calls train.capture              the calls that led to the peak, as a tree
  gpumem report --at 12.5s train.capture           live memory at that time
  gpumem report --at oom train.capture             live memory when an allocation failed
  gpumem report --between start peak train.capture
  gpumem report runs/                              several ranks, side by side: all recordings of a folder
  gpumem report snapshot.pickle                    a PyTorch snapshot
  gpumem report --html train.html train.capture
  gpumem report --format perfetto -o train.pftrace train.capture
  gpumem report --format svg -o train.svg train.capture
  gpumem report --json train.capture | jq '.devices[0].peak_bytes'
  gpumem report --max-peak 20GiB train.capture     exits with 1 if the peak was higher
  gpumem report --max-peak train.py:31=2GiB train.capture";

/// Shows a recording: the peak, its parts, and the memory that was not freed.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ReportArguments {
    /// Recordings, as `gpumem run` and `GPUMEM_CAPTURE` write them, folders of them, patterns such as 'runs/*.capture', or snapshots of
    /// PyTorch (`torch.cuda.memory._dump_snapshot`).
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    view: ViewOptions,
    // This view is not in `ViewOptions`, because it is the only one that can be combined with --format.
    /// The memory at a moment: peak (when most was allocated), process-peak (when the process took most, with the driver's own memory), start,
    /// end, oom (when the driver rejected an allocation), or a time since the start such as 12.5s or 300ms.
    #[arg(long, value_name = "MOMENT", conflicts_with_all = ["view", "limits"])]
    at: Option<AskedMoment>,
    #[command(flatten)]
    call_options: CallOptions,
    /// Write one self-contained page: memory over time, blocks, and a flame graph of any moment. - is stdout.
    #[arg(long, value_name = "OUT", conflicts_with_all = ["view", "at", "json", "format", "limits"])]
    html: Option<PathBuf>,
    /// With --html and more than 64 recordings, the page has all events of a few recordings only: add this rank's events. The option may
    /// be given several times.
    #[arg(long = "rank", value_name = "NUMBER", requires = "html")]
    ranks: Vec<u64>,
    /// Write the recording in the format of another tool, or as a picture.
    #[arg(long, value_name = "FORMAT", conflicts_with_all = ["view", "json", "limits"])]
    format: Option<Format>,
    /// With formats that have stacks: leave out functions that only pass a call on, as --calls does.
    #[arg(long, requires = "format", conflicts_with = "html")]
    fold: bool,
    /// The file that --format writes; a folder for parquet. Without this option, and with -, it writes to stdout.
    #[arg(long, short, value_name = "OUT", requires = "format", conflicts_with = "html")]
    output: Option<PathBuf>,
    /// Print JSON: bytes are exact, and a value that was not measured is null.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    limits: Limits,
}

/// The options of the command line that choose a [`View`], except `--at`. They exclude each other.
#[derive(Debug, Default, Args)]
#[group(id = "view", multiple = false, conflicts_with = "limits")]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of the command line; clap allows one of them")]
struct ViewOptions {
    /// Each scope: its peak, its part of the process's peak, its memory still in use, and its total allocations.
    #[arg(long)]
    tree: bool,
    /// The functions whose calls allocated the blocks that were live at the peak, as a tree.
    #[arg(long)]
    calls: bool,
    /// Each place: its memory at the peak and at the end, and its total allocations.
    #[arg(long)]
    table: bool,
    /// The memory that was not freed, the executable graphs that were not destroyed, and the unused memory of pools.
    #[arg(long)]
    leaks: bool,
    /// The memory that was allocated and freed between two moments, which are written as for --at.
    #[arg(long, value_names = ["MOMENT", "MOMENT"], num_args = 2)]
    between: Option<Vec<AskedMoment>>,
}

/// A report that is shown instead of the summary, with its options.
#[derive(Clone, Copy)]
enum View<'a, M = Moment> {
    Tree,
    Calls(&'a CallOptions),
    Table,
    Leaks,
    At(M),
    Between([M; 2]),
}

/// What the command writes: the summary, a view, a page, or the format of another tool.
enum Output<'a> {
    Summary,
    View(View<'a, AskedMoment>),
    Page { ranks: &'a [u64], to: &'a Path },
    Format { format: Format, moment: Option<AskedMoment>, fold: bool, to: Option<&'a Path> },
}

impl ReportArguments {
    fn chosen_output(&self) -> Output<'_> {
        let Self { files: _, view, at, call_options, html, ranks, format, fold, output, json: _, limits: _ } = self;
        match (format, html, view.chosen(call_options).or(at.map(View::At))) {
            (Some(format), ..) => Output::Format { format: *format, moment: *at, fold: *fold, to: output.as_deref() },
            (None, Some(to), _) => Output::Page { ranks, to },
            (None, None, Some(view)) => Output::View(view),
            (None, None, None) => Output::Summary,
        }
    }
}

impl<'a> View<'a, AskedMoment> {
    /// Returns the view with the moments of a recording.
    fn of(self, history: &History) -> Result<View<'a>, Failure> {
        Ok(match self {
            Self::Tree => View::Tree,
            Self::Calls(options) => View::Calls(options),
            Self::Table => View::Table,
            Self::Leaks => View::Leaks,
            Self::At(moment) => View::At(moment_of(history, moment)?),
            Self::Between([from, to]) => View::Between([moment_of(history, from)?, moment_of(history, to)?]),
        })
    }
}

impl View<'_> {
    /// Returns the moments that the view is about.
    fn moments(&self) -> &[Moment] {
        match self {
            Self::At(moment) => std::slice::from_ref(moment),
            Self::Between(moments) => moments,
            Self::Tree | Self::Calls(_) | Self::Table | Self::Leaks => &[],
        }
    }
}

impl ViewOptions {
    /// Returns the chosen view, if there is one.
    fn chosen<'a>(&self, call_options: &'a CallOptions) -> Option<View<'a, AskedMoment>> {
        let Self { tree, calls, table, leaks, between } = self;
        let between = between.as_deref().and_then(|moments| moments.try_into().ok());
        let views = [
            tree.then_some(View::Tree),
            calls.then_some(View::Calls(call_options)),
            table.then_some(View::Table),
            leaks.then_some(View::Leaks),
            between.map(View::Between),
        ];
        views.into_iter().flatten().next()
    }
}

pub(super) fn execute(mut arguments: ReportArguments) -> Result<Exit, Failure> {
    let empty;
    Recordings { files: arguments.files, empty } = Recordings::of(&arguments.files)?;
    let arguments = &arguments;
    let mut judge = Judge::new(&arguments.limits);
    for file in &empty {
        if judge.has_limits() {
            judge.unknown(file, &files::EMPTY);
        } else {
            terminal::error(&Failure::new(format!("`{}` is left out", file.display()), files::EMPTY, ""));
        }
    }
    let output = arguments.chosen_output();
    let to = match output {
        Output::Page { to, .. } => Some(to),
        Output::Format { to, .. } => to,
        Output::Summary | Output::View(_) => None,
    };
    // `--html a.capture b.capture` would write the page over a recording.
    if let Some(out) = to.filter(|to| files::is_recording(to)) {
        let what = format!("`{}` cannot be written", out.display());
        return Err(Failure::new(what, "it is a recording, which would be lost", "use another file name"));
    }
    let missing = match output {
        Output::Format { format, moment, fold, to } => {
            check_options(format, moment, fold)?;
            return match format {
                Format::Parquet => export_tables(&arguments.files, to),
                _ => export(&arguments.files, format, moment, fold, to),
            };
        }
        Output::Page { ranks, to } => return write_page(&arguments.files, ranks, to),
        Output::View(view) => show(arguments, view)?,
        Output::Summary => summarize(arguments, &mut judge)?,
    };
    let asks_for_losses = judge.asks_for_losses();
    let judged = judge.finish()?;
    Ok(match exit_of(&missing) {
        Exit::Done => judged,
        Exit::Failed if judged == Exit::LimitExceeded && asks_for_losses => Exit::LimitExceeded,
        exit => exit,
    })
}

/// Prints a view. Returns the missing data of each recording.
fn show(arguments: &ReportArguments, asked: View<'_, AskedMoment>) -> Result<Vec<(String, Missing)>, Failure> {
    let mut missing = Vec::new();
    let mut objects = Vec::new();
    for (at, file) in arguments.files.iter().enumerate() {
        let mut history = read(file)?;
        let view = asked.of(&history)?;
        check_moments(&history, view.moments())?;
        if let View::Calls(options) = view {
            options.check(&history)?;
        }
        let data_missing = Missing::of(&history);
        if arguments.json {
            objects.push(ViewObject::of(&mut history, view));
        } else {
            terminal::print_text(|out, paint| {
                if arguments.files.len() > 1 {
                    let name = file.to_string_lossy();
                    writeln!(out, "{}{}:", if at > 0 { "\n" } else { "" }, one_line(&name))?;
                }
                if !data_missing.leaves_all_unknown(&history) {
                    write(&mut history, view, out, paint)?;
                }
                data_missing.in_words().iter().try_for_each(|line| writeln!(out, "{}", paint.on(Role::Alarm, line)))
            })?;
        }
        missing.push((file.display().to_string(), data_missing));
    }
    if arguments.json {
        print_objects(&objects)?;
    }
    Ok(missing)
}

/// Prints the summary, and compares the recordings with the limits. Returns the missing data of each recording.
fn summarize(arguments: &ReportArguments, judge: &mut Judge<'_>) -> Result<Vec<(String, Missing)>, Failure> {
    let is_in_detail = arguments.files.len() == 1 && !arguments.json;
    let mut overview = |file: &PathBuf| {
        let mut history = read(file)?;
        let overview = if is_in_detail { Overview::in_detail(&mut history) } else { Overview::of(&history) };
        judge.add(&history, &overview);
        Ok(overview)
    };
    let overviews = arguments.files.iter().map(&mut overview).collect::<Result<Vec<_>, Failure>>()?;
    if arguments.json {
        print_objects(&overviews)?;
    } else {
        terminal::print_text(|out, paint| summary::write_all(&overviews, out, paint))?;
    }
    Ok(overviews.into_iter().map(|overview| (overview.file, overview.missing)).collect())
}

/// Completes a recording if necessary, and reads it.
pub(super) fn read(file: &Path) -> Result<History, Failure> {
    let still_records = complete_for_report(file);
    let mut history = History::read(file)?;
    history.still_records = still_records;
    Ok(history)
}

/// Prints one recording as an object, and several as a list of objects.
fn print_objects(objects: &[impl Serialize]) -> Result<(), Failure> {
    terminal::print(|out| match objects {
        [only] => json::write(only, out),
        several => json::write(&several, out),
    })
}

/// Writes one page for all recordings. If there are many, each is first read without events, and the chosen ones are
/// read again.
fn write_page(files: &[PathBuf], ranks: &[u64], out: &Path) -> Result<Exit, Failure> {
    let mut page = Page::default();
    let mut missing = Vec::new();
    let failed =
        |file: &Path, error| Failure::new(format!("`{}` cannot be put into a page", file.display()), error, "");
    let are_few = files.len() <= page::MOST_IN_DETAIL;
    for file in files {
        let history = read(file)?;
        working("making the page", || page.add(&history, are_few)).map_err(|error| failed(file, error))?;
        missing.push((file.display().to_string(), Missing::of(&history)));
    }
    let chosen = page.choose(ranks)?;
    for number in chosen.into_iter().filter(|_| !are_few) {
        let history = read(&files[number])?;
        working("making the page", || page.add_events(number, &history))
            .map_err(|error| failed(&files[number], error))?;
    }
    terminal::write_file(out, |out| page.write(out))?;
    Ok(exit_of(&missing))
}

/// Checks that a format can use the options that were given with it.
fn check_options(format: Format, moment: Option<AskedMoment>, fold: bool) -> Result<(), Failure> {
    if moment.is_some() && !format.has_stacks() {
        let what = format!("--at cannot be used with --format {}", format.name());
        return Err(Failure::new(what, "the format has all moments", "leave --at out"));
    }
    if fold && !format.has_stacks() {
        let what = format!("--fold cannot be used with --format {}", format.name());
        return Err(Failure::new(what, "the format has no stacks to fold", "leave --fold out"));
    }
    Ok(())
}

/// Writes a recording in the format of another tool.
fn export(
    files: &[PathBuf],
    format: Format,
    moment: Option<AskedMoment>,
    fold: bool,
    to: Option<&Path>,
) -> Result<Exit, Failure> {
    let [file] = files else {
        let what = format!("--format {} cannot be written", format.name());
        return Err(Failure::new(what, "it is for one recording", "pass one file at a time"));
    };
    let history = read(file)?;
    let moment = moment_of(&history, moment.unwrap_or(AskedMoment::Known(Moment::Peak)))?;
    check_moments(&history, &[moment])?;
    check_format(&history, format, moment)?;
    let output = to.unwrap_or(Path::new("-"));
    if terminal::is_stdout(output) && format.is_binary() && io::stdout().is_terminal() {
        let what = format!("--format {} cannot be written to a terminal", format.name());
        return Err(Failure::new(what, "it is not text", "pass --output FILE"));
    }
    terminal::write_file(output, |out| format.write(&history, moment, fold, out))?;
    Ok(exit_of(&[(file.display().to_string(), Missing::of(&history))]))
}

/// Writes the tables of all recordings into one folder.
#[cfg(feature = "parquet")]
fn export_tables(files: &[PathBuf], to: Option<&Path>) -> Result<Exit, Failure> {
    let Some(folder) = to.filter(|folder| !terminal::is_stdout(folder)) else {
        return Err(Failure::new(
            "--format parquet cannot be written",
            "it consists of several files",
            "pass --output FOLDER",
        ));
    };
    let mut missing = Vec::new();
    let mut names = std::collections::HashSet::new();
    for file in files {
        if !names.insert(file.file_stem()) {
            let what = format!("the tables of `{}` cannot be written", file.display());
            return Err(Failure::new(
                what,
                "another recording has the same name",
                "rename one of them, or pass --output",
            ));
        }
        let history = read(file)?;
        let written = working("writing tables", || crate::formats::parquet::write(&history, folder));
        written.map_err(|error| {
            let what = format!("the tables cannot be written to `{}`", folder.display());
            Failure::new(what, error, "use another --output")
        })?;
        missing.push((file.display().to_string(), Missing::of(&history)));
    }
    Ok(exit_of(&missing))
}

#[cfg(not(feature = "parquet"))]
fn export_tables(_: &[PathBuf], _: Option<&Path>) -> Result<Exit, Failure> {
    let cause = "this gpumem was built without it";
    Err(Failure::new("--format parquet cannot be written", cause, "build gpumem with the feature parquet"))
}

/// Returns the exit code. If a file ends too early, an error is also printed on stderr.
pub(crate) fn exit_of(missing: &[(String, Missing)]) -> Exit {
    let mut exit = Exit::Done;
    for (file, missing) in missing {
        if let Some(why) = &missing.incomplete {
            let next = "the report covers the data before that";
            terminal::error(&Failure::new(format!("`{file}` has no end"), why, next));
            exit = Exit::Failed;
        }
    }
    exit
}

/// Checks that the recording contains the data that a format shows. Formats cannot mark data as unknown.
fn check_format(history: &History, format: Format, moment: Moment) -> Result<(), Failure> {
    let what = format!("`{}` cannot be written as {}", history.path.display(), format.name());
    if format.has_stacks() && !history.is_known_at(moment) {
        let cause = format!("the blocks that were live at {moment} are not in the recording");
        return Err(Failure::new(what, cause, "pass --at peak or --at end"));
    }
    Ok(())
}

/// Returns the moment of a recording.
fn moment_of(history: &History, moment: AskedMoment) -> Result<Moment, Failure> {
    let AskedMoment::Known(moment) = moment else {
        let highest = history.process_peaks().into_iter().flatten().max_by_key(|process| process.bytes);
        return highest.and_then(|process| process.time).map(Moment::Time).ok_or_else(|| {
            let what = format!("`{}` cannot be shown at `process-peak`", history.path.display());
            let cause = "it does not contain the driver's own memory";
            Failure::new(
                what,
                cause,
                "use --at peak, or record with a version of gpumem that measures it, on a GPU with NVML",
            )
        });
    };
    Ok(moment)
}

/// Checks that the recording contains the requested moments.
fn check_moments(history: &History, moments: &[Moment]) -> Result<(), Failure> {
    if !moments.contains(&Moment::Oom) {
        return Ok(());
    }
    let file = history.path.display();
    let what = format!("`{file}` cannot be shown at `oom`");
    match history.oom() {
        None => Err(Failure::new(what, "the driver rejected no allocation", "use another moment, such as peak")),
        Some(rejected) if !history.is_whole_at(rejected.number) => {
            let cause = "the recording contains only a part of the events, without the blocks that were live then";
            Err(Failure::new(what, cause, "record without --only-peak, or with a larger --max-size"))
        }
        Some(_) => Ok(()),
    }
}

/// Writes a view as text.
fn write(history: &mut History, view: View<'_>, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    const TOO_LARGE: &str = "the recording has too many paths of scopes for this report";
    match view {
        View::Tree if history.has_only_peaks() => {
            writeln!(out, "scopes are not in the recording (--only-peak): record without that")
        }
        View::Tree => match history.reader().summary() {
            Some(summary) => writeln!(out, "{}", InPaint(&summary, paint)),
            None => writeln!(out, "{TOO_LARGE}"),
        },
        View::Calls(options) => calls::write(history, options, out, paint),
        View::Table => {
            places::write(history, out, paint)?;
            tensors::write_at(history, Moment::Peak, false, out, paint)
        }
        View::Leaks => {
            writeln!(out, "{}", InPaint(&history.leaks(), paint))?;
            process::write_kept(&history.process_at(Moment::End), out, paint)?;
            tensors::write_at(history, Moment::End, false, out, paint)
        }
        View::At(at) => {
            moment::write_at(history, at, out, paint)?;
            tensors::write_at(history, at, true, out, paint)
        }
        View::Between(moments) => moment::write_between(history, moments, out, paint),
    }
}

/// The object that `--json` prints for a view of one recording: the data of the view, and what all views have.
#[derive(Serialize)]
struct ViewObject {
    file: String,
    #[serde(flatten)]
    data: ViewData,
    missing: Missing,
    #[serde(skip_serializing_if = "Option::is_none")]
    torch: Option<Vec<tensors::TensorMoment>>,
    /// Memory that stays with the process although it may not need it, by device; only with the memory that was not freed.
    #[serde(skip_serializing_if = "Option::is_none")]
    kept_by_driver: Option<Vec<process::Kept>>,
}

/// The data of a view. Each variant is a field of the object, with the same name.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum ViewData {
    Scopes(Option<Vec<ScopeStats>>),
    Calls(AllCalls),
    NotFreed(NotFreed),
    Devices(Vec<moment::DeviceMoment>),
    Places(Vec<places::PlaceStats>),
}

impl ViewObject {
    fn of(history: &mut History, view: View<'_>) -> Self {
        let data = match view {
            View::Tree => {
                let scopes = if history.has_only_peaks() { None } else { history.reader().summary() };
                ViewData::Scopes(scopes.map(|summary| summary.scopes.into_iter().map(ScopeStats::of).collect()))
            }
            View::Calls(options) => ViewData::Calls(options.of(history)),
            View::Table => ViewData::Places(places::places(history)),
            View::Leaks => ViewData::NotFreed(NotFreed::of(&history.leaks(), history.has_only_peaks())),
            View::At(at) => ViewData::Devices(moment::at(history, at)),
            View::Between([from, to]) => ViewData::Devices(moment::between(history, from, to)),
        };
        let moment = match view {
            View::Leaks => Some(Moment::End),
            View::At(at) => Some(at),
            View::Tree | View::Calls(_) | View::Table | View::Between(_) => None,
        };
        let has_segments = matches!(view, View::At(_));
        let torch = moment.and_then(|moment| tensors::at(history, moment, has_segments));
        let kept_by_driver = matches!(view, View::Leaks).then(|| process::kept(history));
        Self { file: history.path.display().to_string(), data, missing: Missing::of(history), torch, kept_by_driver }
    }
}

/// The values of a scope. The field names are those in JSON.
#[derive(Serialize)]
struct ScopeStats {
    scope: Vec<String>,
    opened_at: Option<String>,
    device: u32,
    simulated: bool,
    calls: u64,
    peak_bytes: u64,
    at_peak_bytes: u64,
    device_peak_bytes: u64,
    used_bytes: u64,
    allocated_bytes: u64,
    allocations: u64,
}

impl ScopeStats {
    fn of(scope: gpumem_core::report::ScopeSummary) -> Self {
        Self {
            scope: scope.path,
            opened_at: scope.place,
            device: scope.device,
            simulated: scope.simulated,
            calls: scope.calls,
            peak_bytes: scope.peak.get(),
            at_peak_bytes: scope.at_peak.get(),
            device_peak_bytes: scope.device_peak.get(),
            used_bytes: scope.used.get(),
            allocated_bytes: scope.allocated.get(),
            allocations: scope.allocations,
        }
    }
}

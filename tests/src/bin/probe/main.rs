//! A program that measures memory. The tests run it on machines with faults in the driver.
//!
//! Each argument is a command. The probe prints its answer as a line `> command: answer` on stdout. The answer of a command that
//! fails is `error[…]`, with the predicates of the error between the brackets, followed by its message. All other output is from
//! gpumem.
//!
//! - `get [device]`, `get_all`, `free`, `free_no_cache`, `used`, `used_no_cache`, `max_free`, `preload`, `count`, and each of
//!   them after `try_`; `available`, `current`, `name [device]`: the queries with these names;
//! - `mem_get_info [device]`, `empty_cache`, `get_device_name [device]`; `processes [device]`: the known facts about each
//!   process; `list_processes [device]`: the text, with `|` between its lines;
//! - `handle [device]`: looks a device up; `fast`, `try_fast`: the used memory through this handle;
//! - `memory_allocated`, `max_memory_allocated`, `memory_reserved`, `max_memory_reserved`, `reset_peaks`, `memory_stats`, each
//!   with `[device]`: bytes; `memory_stats` leaves out zeros; `memory_snapshot`: the live blocks, the largest first;
//! - `new`, `build [device]`: start a trace; `report`, `reset`, `data`, `stop`, `drop`, `forget`: act on the latest trace;
//! - `context device`: creates a context; `pooled MiB`: allocates in the latest context, through cudarc; `give_back`: frees all
//!   of it; `capture`: captures a stream until `end_capture`, whose answer is whether the capture is whole;
//! - `exact [device]`, `of_thread [device]`, `sampled [device]`: start a trace with that gauge, or of this thread only;
//!   `figures [n]`: the used and peaked bytes of the latest trace, or of the n-th, and why they may be wrong; `status`;
//!   `status_text`: its text, with `|` between its lines; `intercepted_by`, `why_not_dispatch`: these fields of the status;
//!   `environment`: the variables that its text lists, with `|` between them;
//! - `subscribe`, `unsubscribe`: start and end interception; `tool_subscribe library`, `tool_unsubscribe library`: the same with
//!   CUPTI, as another tool in this process;
//! - `scope name`: starts an exact trace that prints nothing; `breakdown [device]`, `summary`: these reports, in one line;
//!   `taken [device]`: the parts of the breakdown that the driver took, in KiB, without their lines;
//!   `all_reports`: the reports that a recording also has: the whole summary, the statistics and the live blocks;
//!   `print_refusals`: prints each later allocation that fails as an answer `refused`; `on_refusal function argument…`: each such
//!   allocation makes this call; `panic_on_refusal`: each such allocation panics; `retry function argument…`: makes a call with a
//!   second try;
//! - `pool name`: registers a pool on the current device; `part address bytes`, `part_freed address`, `reserved bytes`,
//!   `pool_dropped`: the reports of the pool;
//! - `call function argument…`: calls the driver, see `raw.rs`; `cancelled function argument…`: the same on a thread that is
//!   cancelled in the call; `let name value`: names a value for arguments; `value name`: the value that a call returned;
//! - `driver_memory`, `took`: see `driver_memory.rs`;
//! - `toggling threads rounds`, `rush threads`, `go_on threads`: see `churn.rs`; `forks children`: see `forks.rs`;
//! - `until_killed when`, `killed_on_new_stacks micros`, `busy rounds`: see `killed.rs`; `await_file path`: waits for a
//!   file; `await_recorded folder`: waits until a recording in the folder has an allocation; `exec program & argument & …`: runs
//!   another program in this process;
//! - `load_and_close path`: loads a tool as the driver does, and closes it; `inject`: loads the tool that the environment names;
//! - `slot_note function…`, `slot_write_back function…`: another tool notes the content of slots, and writes it back;
//!   `slot_replace function…`, `slot_restore function…`: another tool intercepts functions, or removes its latest hook of each;
//!   `slot_replace_past function…`: intercepts them with hooks that call the noted functions; `slot_calls function`: the number
//!   of calls that its hooks saw; `slot_is function`: the owner of the function in the slot: `driver`, `tool` or `other`;
//!   `stub_bytes function count`: the bytes of a stub now;
//! - `other_thread command | command…`: runs the commands on another thread; one command gives its answer; `behind command | command…`:
//!   runs the commands on another thread, and does not wait for them; `at_exit …`: when the process exits;
//!   `at_thread_exit …`: while another thread's locals are destroyed; `fork …`: in a child of this process;
//! - `await stale`, `await fresh`: wait until the latest trace is stale or fresh; `await readable`: until the current device can
//!   be read; `await a_thread`, `await no_threads`: until gpumem has that many threads; `await stderr`: until something was
//!   written to stderr, which is a file;
//! - `tracker`, `track`, `label …` and other commands about trackers: see `track.rs`;
//! - `by_dispatch [device]`, `by_cupti [device]`, `sampled_by_dispatch [device]`: start a trace with that source;
//! - `sockets`: the number of sockets among the descriptors; `close_descriptors path`: closes all but the first three, and lets
//!   this file take their numbers; `limit_files bytes`: limits the size of files; `end_main_thread`: ends only this thread;
//! - `abort`: ends the process like a crash; `sleep ms`; `maps name`: whether a file with this text in its name is mapped;
//!   `threads`: the number of gpumem's threads.

use std::cell::RefCell;
use std::fmt::Display;
use std::os::unix::process::CommandExt;
use std::process::{self, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

mod churn;
mod driver_memory;
mod forks;
mod killed;
mod places;
mod raw;
mod slots;
mod track;

use crate::raw::{Names, Tool};
use cudarc::driver::result::stream::{self, StreamKind};
use cudarc::driver::sys::{CUstream, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use gpumem::{
    Bytes, Error, Gauge, GpuHandle, GpuMemTrace, GpuMemory, intercept::Source, pool::Pool, tracker::MemTracker,
};

/// An error from a command or from cudarc, and not from gpumem. It means that the test is wrong.
type Trouble = Box<dyn std::error::Error>;

/// Runs commands that change the process in ways that programs rarely do.
fn behave(verb: &str, argument: &str) -> Result<Option<String>, Trouble> {
    match verb {
        "inject" => Ok(Some(raw::inject()?.to_string())),
        "close_descriptors" => raw::close_descriptors(argument).map(|()| Some("closed".to_owned())),
        "busy" => killed::be_busy(argument.parse()?).map(Some),
        "sockets" => {
            let is_socket = |link: &std::path::PathBuf| link.to_string_lossy().starts_with("socket:");
            let entries = fs::read_dir("/proc/self/fd")?.flatten();
            let sockets = entries.filter(|entry| fs::read_link(entry.path()).is_ok_and(|link| is_socket(&link)));
            Ok(Some(sockets.count().to_string()))
        }
        "limit_files" => Ok(Some(raw::limit_files(argument.parse()?).to_string())),
        "end_main_thread" => {
            raw::end_main_thread();
            Err("it goes on".into())
        }
        _ => Ok(None),
    }
}

fn main() -> ExitCode {
    let mut probe = Probe::default();
    let mut code = ExitCode::SUCCESS;
    for command in env::args().skip(1) {
        if !probe.answer(&command) {
            code = ExitCode::FAILURE;
        }
    }
    code
}

#[derive(Default)]
struct Probe {
    handle: Option<GpuHandle>,
    traces: Vec<GpuMemTrace>,
    trackers: Vec<MemTracker>,
    labelled: Vec<CudaSlice<f32>>,
    blocks: Vec<CudaSlice<u8>>,
    streams: Vec<Arc<CudaStream>>,
    captured: Option<CUstream>,
    names: Names,
    tool: Tool,
    pool: Option<Pool>,
    figures: driver_memory::Figures,
}

impl Probe {
    /// Creates a state that knows these names.
    fn knowing(names: Names) -> Self {
        Self { names, ..Self::default() }
    }

    /// Prints the answer to a command. Returns `false` if there is none.
    fn answer(&mut self, command: &str) -> bool {
        let answer = self.run(command);
        let reported = answer.as_ref().map_or_else(|trouble| format!("no answer: {trouble}"), Clone::clone);
        println!("> {command}: {reported}");
        answer.is_ok()
    }

    /// Prints the answers to commands with `|` between them. Returns an error if one has none.
    fn answer_each(&mut self, commands: &str) -> Result<String, String> {
        let answered = commands.split('|').map(str::trim).filter(|command| self.answer(command)).count();
        if answered == commands.split('|').count() { Ok("done".to_owned()) } else { Err("one failed".to_owned()) }
    }

    /// Returns the answer to one command, or prints those to several.
    fn reported(&mut self, commands: &str) -> Result<String, String> {
        if commands.contains('|') {
            return self.answer_each(commands);
        }
        self.run(commands).map_err(|trouble| trouble.to_string())
    }

    /// Returns the answer, or the error of the command.
    fn run(&mut self, command: &str) -> Result<String, Trouble> {
        let (verb, argument) = command.split_once(' ').unwrap_or((command, ""));
        if let Some(answer) = slots::answer(verb, argument)? {
            return Ok(answer);
        }
        for part in [Self::go, Self::query, Self::trace, Self::track, Self::act, Self::pool, Self::drive] {
            if let Some(answer) = part(self, verb, argument)? {
                return Ok(answer);
            }
        }
        Err("no such command".into())
    }

    /// Runs commands that always answer `done`. `None` if the command is none of these.
    fn go(&mut self, verb: &str, argument: &str) -> Result<Option<String>, Trouble> {
        let trace = self.traces.last_mut().ok_or("there is no trace");
        match verb {
            "preload" => gpumem::preload(),
            "new" => self.traces.push(GpuMemTrace::new()),
            "report" => trace?.report(),
            "reset" => trace?.reset(),
            "stop" => trace?.stop(),
            "drop" => drop(self.traces.pop()),
            "forget" => std::mem::forget(self.traces.pop()),
            "give_back" => {
                self.blocks.clear();
                self.streams.iter().try_for_each(|stream| stream.synchronize())?;
            }
            "unsubscribe" => gpumem::intercept::unsubscribe(),
            "on_refusal" => places::on_refusal(&self.names, argument),
            "panic_on_refusal" => places::panic_on_refusal(),
            "print_refusals" => places::print_refusals(),
            "sleep" => thread::sleep(Duration::from_millis(argument.parse()?)),
            "new_tracker" => self.trackers.push(MemTracker::new()),
            "drop_labelled" => self.labelled.clear(),
            _ => return Ok(None),
        }
        Ok(Some("done".to_owned()))
    }

    /// Runs commands that query values. `None` if the command is none of these.
    fn query(&mut self, verb: &str, argument: &str) -> Result<Option<String>, Trouble> {
        Ok(Some(match verb {
            "get" => gpumem::gpu_mem_get(device(argument)?).to_string(),
            "try_get" => reported(gpumem::try_gpu_mem_get(device(argument)?)),
            "get_all" => all(&gpumem::gpu_mem_get_all()),
            "try_get_all" => reported(gpumem::try_gpu_mem_get_all().map(|devices| all(&devices))),
            "free" => gpumem::gpu_mem_get_free().to_string(),
            "try_free" => reported(gpumem::try_gpu_mem_get_free()),
            "free_no_cache" => gpumem::gpu_mem_get_free_no_cache().to_string(),
            "try_free_no_cache" => reported(gpumem::try_gpu_mem_get_free_no_cache()),
            "used" => gpumem::gpu_mem_get_used().to_string(),
            "try_used" => reported(gpumem::try_gpu_mem_get_used()),
            "used_no_cache" => gpumem::gpu_mem_get_used_no_cache().to_string(),
            "try_used_no_cache" => reported(gpumem::try_gpu_mem_get_used_no_cache()),
            "max_free" => most_free(gpumem::gpu_with_max_free_mem()),
            "try_max_free" => reported(gpumem::try_gpu_with_max_free_mem().map(|best| most_free(best.unzip()))),
            "try_preload" => reported(gpumem::try_preload().map(|()| "done")),
            "available" => gpumem::is_available().to_string(),
            "count" => gpumem::device::count().unwrap_or(0).to_string(),
            "try_count" => reported(gpumem::device::count()),
            "current" => reported(gpumem::device::current()),
            "name" => reported(gpumem::device::name(device(argument)?)),
            "mem_get_info" => {
                reported(gpumem::torch::mem_get_info(device(argument)?).map(|(free, total)| format!("{free} {total}")))
            }
            "empty_cache" => reported(gpumem::torch::empty_cache().map(|()| "done")),
            "get_device_name" => reported(gpumem::torch::get_device_name(device(argument)?)),
            "processes" => {
                reported(gpumem::torch::list_gpu_processes(device(argument)?).map(|found| processes(&found)))
            }
            "list_processes" => reported(
                gpumem::torch::list_gpu_processes(device(argument)?).map(|found| found.to_string().replace('\n', "|")),
            ),
            "memory_allocated" => reported(gpumem::torch::memory_allocated(device(argument)?).map(Bytes::get)),
            "max_memory_allocated" => reported(gpumem::torch::max_memory_allocated(device(argument)?).map(Bytes::get)),
            "memory_reserved" => reported(gpumem::torch::memory_reserved(device(argument)?).map(Bytes::get)),
            "max_memory_reserved" => reported(
                gpumem::torch::max_memory_reserved(device(argument)?)
                    .map(|peak| format!("{} to {}", peak.at_least.get(), peak.at_most.get())),
            ),
            "reset_peaks" => reported(gpumem::torch::reset_peak_memory_stats(device(argument)?).map(|()| "done")),
            "memory_stats" => {
                reported(gpumem::torch::memory_stats(device(argument)?).map(|stats| memory_stats(&stats)))
            }
            "memory_snapshot" => reported(gpumem::torch::memory_snapshot().map(|blocks| {
                let reported = blocks.iter().map(|block| format!("{} {}", block.bytes.get(), block.kind));
                reported.collect::<Vec<_>>().join(", ")
            })),
            "handle" => reported(GpuHandle::new(device(argument)?).map(|handle| {
                self.handle = Some(handle);
                "found"
            })),
            "fast" => gpumem::gpu_mem_get_used_fast(self.handle.as_ref().ok_or("there is no handle")?).to_string(),
            "try_fast" => {
                reported(gpumem::try_gpu_mem_get_used_fast(self.handle.as_ref().ok_or("there is no handle")?))
            }
            _ => return Ok(None),
        }))
    }

    /// Runs commands about traces.
    fn trace(&mut self, verb: &str, argument: &str) -> Result<Option<String>, Trouble> {
        Ok(Some(match verb {
            "build" | "exact" | "sampled" | "of_thread" | "by_dispatch" | "by_cupti" | "sampled_by_dispatch" => {
                let builder = GpuMemTrace::builder();
                let builder = match verb {
                    "build" => builder,
                    "exact" => builder.gauge(Gauge::Exact),
                    "sampled" => builder.gauge(Gauge::Sampled),
                    "by_dispatch" => builder.source(Source::Dispatch),
                    "by_cupti" => builder.source(Source::Cupti),
                    "sampled_by_dispatch" => builder.gauge(Gauge::Sampled).source(Source::Dispatch),
                    _ => builder.thread_local_only(),
                };
                let builder = match device(argument)? {
                    Some(device) => builder.device(device),
                    None => builder,
                };
                reported(builder.start().map(|trace| {
                    self.traces.push(trace);
                    "started"
                }))
            }
            "scope" => reported(places::scope(argument).map(|trace| {
                self.traces.push(trace);
                "opened"
            })),
            "figures" => {
                let number = if argument.is_empty() { self.traces.len().wrapping_sub(1) } else { argument.parse()? };
                let data = self.traces.get(number).ok_or("there is no such trace")?.data();
                let missing = [
                    (data.gauge != Gauge::Exact, data.gauge.to_string()),
                    (data.untracked > 0, format!("{} untracked", data.untracked)),
                    (data.lost > 0, format!("{} lost", data.lost)),
                    (data.stale, "stale".to_owned()),
                ];
                let missing = missing.into_iter().filter(|(is_so, _)| *is_so).map(|(_, text)| format!(", {text}"));
                format!("{} {}{}", data.used.get(), data.peaked.get(), missing.collect::<String>())
            }
            "taken_inside" => places::taken_inside(self.traces.last().ok_or("there is no trace")?),
            "data" => {
                let data = self.traces.last().ok_or("there is no trace")?.data();
                format!(
                    "device={} used={} peaked={} gauge={} stale={}",
                    data.device,
                    data.used.get(),
                    data.peaked.get(),
                    data.gauge,
                    data.stale
                )
            }
            _ => return Ok(None),
        }))
    }

    /// Runs commands about other events.
    fn act(&mut self, verb: &str, argument: &str) -> Result<Option<String>, Trouble> {
        Ok(Some(match verb {
            "context" => {
                let context = CudaContext::new(argument.parse::<u32>()? as usize)?;
                self.streams.push(context.default_stream());
                "created".to_owned()
            }
            "pooled" => {
                let stream = self.streams.last().ok_or("there is no context")?;
                self.blocks.push(stream.alloc_zeros((argument.parse::<u32>()? as usize) << 20)?);
                "allocated".to_owned()
            }
            "capture" => {
                // The stream waits for the legacy stream, as CUDA's own streams do by default and cudarc's do not.
                let stream = stream::create(StreamKind::Default)?;
                // SAFETY: the stream was just created, and is not destroyed while this process runs.
                unsafe { stream::begin_capture(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL) }?;
                self.captured = Some(stream);
                "begun".to_owned()
            }
            "end_capture" => {
                let stream = self.captured.take().ok_or("there is no capture")?;
                // SAFETY: the stream was created by `capture` and still exists.
                match unsafe { stream::end_capture(stream) } {
                    Ok(_) => "whole".to_owned(),
                    Err(error) => format!("broken: {error}"),
                }
            }
            "await" => await_or_fail(|| self.is_so(argument))?,
            "abort" => process::abort(),
            "threads" => threads()?.to_string(),
            "maps" => {
                let has = fs::read_to_string("/proc/self/maps")?.lines().any(|line| line.contains(argument));
                if has { "yes" } else { "no" }.to_owned()
            }
            _ => return Ok(None),
        }))
    }

    /// Runs commands about pools.
    fn pool(&mut self, verb: &str, argument: &str) -> Result<Option<String>, Trouble> {
        let numbers = argument.split(' ').map(|word| self.names.value(word));
        let pool = self.pool.as_ref().ok_or("there is no pool");
        match verb {
            "pool" => {
                let registered = Pool::register(argument, None).map(|pool| self.pool = Some(pool));
                return Ok(Some(reported(registered.map(|()| "registered"))));
            }
            "part" => match numbers.collect::<Result<Vec<_>, _>>()?[..] {
                [address, bytes] => pool?.allocated(address, Bytes::new(bytes)),
                _ => return Err("an address and a size".into()),
            },
            "part_freed" => pool?.freed(self.names.value(argument)?),
            "reserved" => pool?.set_reserved(Bytes::new(self.names.value(argument)?)),
            "pool_dropped" => self.pool = None,
            _ => return Ok(None),
        }
        Ok(Some("done".to_owned()))
    }

    /// Runs commands that call the driver, and commands about the observers of calls.
    fn drive(&mut self, verb: &str, argument: &str) -> Result<Option<String>, Trouble> {
        Ok(Some(match verb {
            "call" => self.names.call(argument)?.to_string(),
            "let" => self.names.set(argument)?,
            "value" => self.names.get(argument).to_string(),
            "toggling" => {
                let (threads, rounds) = argument.split_once(' ').ok_or("two numbers")?;
                churn::toggling(threads.parse()?, rounds.parse()?)?
            }
            "driver_memory" => driver_memory::take_all(&self.names)?,
            "took" => self.figures.took()?,
            "forks" => forks::forks(argument.parse()?)?,
            "rush" => churn::rush(argument.parse()?)?,
            "library" => raw::call_library(argument)?,
            "subscribe" => reported(gpumem::intercept::subscribe().map(|()| "done")),
            "tool_subscribe" => self.tool.subscribe(argument)?.to_string(),
            "tool_unsubscribe" => self.tool.unsubscribe(argument)?.to_string(),
            "status_text" => gpumem::status().to_string().replace('\n', "|"),
            "status" => status(),
            "environment" => {
                let text = gpumem::status().to_string().replace('\n', "|");
                text.split_once("|environment:|").map_or("none", |(_, variables)| variables).to_owned()
            }
            "intercepted_by" => gpumem::status().intercepted_by.unwrap_or_else(|| "nothing".to_owned()),
            "why_not_dispatch" => {
                gpumem::status().why_not_dispatch.map_or_else(|| "none".to_owned(), |why| why.to_string())
            }
            "load_and_close" => raw::load_and_close(argument)?.to_string(),
            "go_on" => churn::go_on(argument.parse()?)?,
            "breakdown" => reported(places::breakdown(device(argument)?)),
            "taken" => reported(places::taken(device(argument)?)),
            "summary" => places::summary(),
            "all_reports" => reported(places::all_reports()),
            "retry" => places::retry(&self.names, argument)?,
            "other_thread" => {
                let names = self.names.clone();
                let ended = thread::scope(|scope| scope.spawn(|| Self::knowing(names).reported(argument)).join());
                ended.unwrap_or_else(|_| Err("the thread panicked".to_owned()))?
            }
            "behind" => {
                let (names, commands) = (self.names.clone(), argument.to_owned());
                thread::spawn(move || _ = Self::knowing(names).reported(&commands));
                "started".to_owned()
            }
            "at_exit" => {
                let (names, commands) = (self.names.clone(), argument.to_owned());
                raw::at_exit(move || _ = Self::knowing(names).answer_each(&commands));
                "set".to_owned()
            }
            "at_thread_exit" => {
                let late = Late { names: self.names.clone(), commands: argument.to_owned() };
                let ended = thread::spawn(move || LATE.with(|place| *place.borrow_mut() = Some(late))).join();
                ended.map_or_else(|_| Err("the thread panicked"), |()| Ok("done".to_owned()))?
            }
            "await_file" => await_or_fail(|| Ok(fs::exists(argument)?))?,
            "await_recorded" => await_or_fail(|| killed::has_an_allocation(argument))?,
            "killed_on_new_stacks" => killed::allocate_on_new_stacks(argument.parse()?)?,
            "until_killed" => killed::allocate_until_killed(argument)?,
            "exec" => {
                let mut words = argument.split(" & ");
                return Err(process::Command::new(words.next().unwrap_or("")).args(words).exec().into());
            }
            "fork" => match raw::fork()? {
                Some(status) => format!("the child ended with {status}"),
                None => process::exit(i32::from(self.answer_each(argument).is_err())),
            },
            "cancelled" => self.names.cancelled(argument)?.to_owned(),
            _ => return behave(verb, argument),
        }))
    }

    fn is_so(&self, what: &str) -> Result<bool, Trouble> {
        let stale = self.traces.last().map(|trace| trace.data().stale);
        Ok(match what {
            "stale" => stale == Some(true),
            "fresh" => stale == Some(false),
            "readable" => gpumem::try_gpu_mem_get(None).is_ok(),
            "a_thread" => threads()? == 1,
            "no_threads" => threads()? == 0,
            "stderr" => fs::metadata("/proc/self/fd/2")?.len() > 0,
            _ => return Err("no such thing to wait for".into()),
        })
    }
}

/// Waits until the condition is true.
fn await_or_fail(is_so: impl Fn() -> Result<bool, Trouble>) -> Result<String, Trouble> {
    let started = Instant::now();
    while started.elapsed() < PATIENCE {
        if is_so()? {
            return Ok("so".to_owned());
        }
        thread::sleep(Duration::from_millis(1));
    }
    Err("waited in vain".into())
}

/// The command that a thread runs when its locals are destroyed.
struct Late {
    names: Names,
    commands: String,
}

impl Drop for Late {
    fn drop(&mut self) {
        _ = Probe::knowing(self.names.clone()).answer_each(&self.commands);
    }
}

thread_local! {
    static LATE: RefCell<Option<Late>> = const { RefCell::new(None) };
}

/// Returns the status in one line.
fn status() -> String {
    let status = gpumem::status();
    let live = status.live.iter().map(|live| format!(" {}={}/{}", live.kind, live.bytes.get(), live.blocks));
    format!(
        "gauge={} source={} events={} untracked={} lost={}{} by={} why={}",
        status.gauge,
        status.source,
        status.events,
        status.untracked,
        status.lost,
        live.collect::<String>(),
        status.intercepted_by.as_deref().map_or("nothing", |path| path.rsplit('/').next().unwrap_or(path)),
        status.why_not_exact.map_or_else(|| "none".to_owned(), |why| why.to_string()),
    )
}

/// Returns the kinds of memory that were used: current/peak/allocated/freed bytes, and the same of blocks.
fn memory_stats(stats: &gpumem::report::MemoryStats) -> String {
    let reported = stats.named().into_iter().filter(|(_, stat)| stat.blocks.allocated > 0).map(|(name, stat)| {
        let (bytes, blocks) = (stat.bytes, stat.blocks);
        let [current, peak, allocated, freed] =
            [bytes.current, bytes.peak, bytes.allocated, bytes.freed].map(Bytes::get);
        let blocks = format!("{}/{}/{}/{}", blocks.current, blocks.peak, blocks.allocated, blocks.freed);
        format!("{name}={current}/{peak}/{allocated}/{freed},{blocks} ")
    });
    let missed = format!("untracked={} lost={}", stats.untracked, stats.lost);
    format!("{}{missed}", reported.collect::<String>())
}

/// The longest wait, on a machine that may be busy.
const PATIENCE: Duration = Duration::from_secs(100);

/// Parses a device such as `0`. An empty argument means the current device.
fn device(argument: &str) -> Result<Option<u32>, Trouble> {
    if argument.is_empty() { Ok(None) } else { Ok(Some(argument.parse()?)) }
}

fn reported<T: Display>(result: Result<T, Error>) -> String {
    match result {
        Ok(value) => value.to_string(),
        Err(error) => {
            let flags = [
                ("unavailable", error.is_unavailable()),
                ("unknown device", error.is_unknown_device()),
                ("invalid setting", error.is_invalid_setting()),
                ("out of memory", error.is_out_of_memory()),
                ("busy", error.is_busy()),
                ("unknown block", error.is_unknown_block()),
            ];
            let mut flags: Vec<String> =
                flags.iter().filter(|(_, is_so)| *is_so).map(|(flag, _)| (*flag).to_owned()).collect();
            flags.extend(error.code().map(|(number, name)| format!("{number} {name}")));
            format!("error[{}] {error}", flags.join(", "))
        }
    }
}

fn all(devices: &[GpuMemory]) -> String {
    let devices: Vec<String> = devices.iter().map(GpuMemory::to_string).collect();
    format!("[{}]", devices.join(" "))
}

/// Returns the processes. The id of this process is written as `own`.
fn processes(found: &gpumem::torch::GpuProcesses) -> String {
    let line = |process: &gpumem::report::GpuProcess| {
        let pid = if process.pid == process::id() { "own".to_owned() } else { process.pid.to_string() };
        let used = process.used.map_or_else(|| "?".to_owned(), |used| used.to_string());
        format!("{pid} {} {} {used}", process.name.as_deref().unwrap_or("?"), process.kind)
    };
    let lines: Vec<String> = found.processes.iter().map(line).collect();
    format!("{}: {}", found.device, lines.join(", "))
}

fn most_free((device, free): (Option<u32>, impl Into<Option<gpumem::Bytes>>)) -> String {
    format!("{device:?} {}", free.into().unwrap_or_default())
}

fn threads() -> io::Result<usize> {
    let mut count = 0;
    for task in fs::read_dir("/proc/self/task")? {
        // A thread may end between the two calls.
        let name = fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
        count += usize::from(name.starts_with("gpumem"));
    }
    Ok(count)
}

//! A program that measures, for the tests to run where something is wrong with the driver.
//!
//! Each argument is a command. Its answer is a line `> command: answer` on stdout; what failed answers `error[…]` with
//! what a program could tell of the error between the brackets, then its message. All else on stdout and stderr is
//! gpumem's.
//!
//! - `get [device]`, `get_all`, `free`, `free_no_cache`, `used`, `used_no_cache`, `max_free`, `preload`, `count`, and
//!   each of them after `try_`; `available`, `current`, `name [device]`;
//! - `handle [device]`: looks a device up; `fast`, `try_fast`: used memory through it;
//! - `new`, `build [device]`: a trace; `report`, `reset`, `data`, `stop`, `drop`: what to do with the last one;
//! - `context device`; `pooled MiB`: allocates on the last context, through cudarc; `give_back`: all of it; `capture`:
//!   a stream is captured until `end_capture`, which tells whether the capture is whole;
//! - `other_thread command…`: the command, on another thread;
//! - `await stale`, `await fresh`: until the last trace is so; `await readable`: until the current device can be
//!   read; `await a_thread`, `await no_threads`: until that many of gpumem's threads run;
//! - `sleep ms`, `threads`: how many threads of gpumem's run.

use std::fmt::Display;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use cudarc::driver::result::stream::{self, StreamKind};
use cudarc::driver::sys::{CUstream, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use gpumem::{Error, GpuHandle, GpuMemTrace, GpuMemory};

/// What is wrong with a command or with cudarc, and nothing of gpumem's: the test is then wrong.
type Trouble = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let mut probe = Probe::default();
    let mut code = ExitCode::SUCCESS;
    for command in env::args().skip(1) {
        let answer = probe.run(&command).unwrap_or_else(|trouble| {
            code = ExitCode::FAILURE;
            format!("no answer: {trouble}")
        });
        println!("> {command}: {answer}");
    }
    code
}

#[derive(Default)]
struct Probe {
    handle: Option<GpuHandle>,
    traces: Vec<GpuMemTrace>,
    blocks: Vec<CudaSlice<u8>>,
    streams: Vec<Arc<CudaStream>>,
    captured: Option<CUstream>,
}

impl Probe {
    /// The answer, or what is wrong with the command.
    fn run(&mut self, command: &str) -> Result<String, Trouble> {
        let (verb, argument) = command.split_once(' ').unwrap_or((command, ""));
        for part in [Self::query, Self::trace, Self::act] {
            if let Some(answer) = part(self, verb, argument)? {
                return Ok(answer);
            }
        }
        Err("no such command".into())
    }

    /// What asks; `None` where the command is none of these.
    fn query(&mut self, verb: &str, argument: &str) -> Result<Option<String>, Trouble> {
        Ok(Some(match verb {
            "get" => gpumem::gpu_mem_get(device(argument)?).to_string(),
            "try_get" => told(gpumem::try_gpu_mem_get(device(argument)?)),
            "get_all" => all(&gpumem::gpu_mem_get_all()),
            "try_get_all" => told(gpumem::try_gpu_mem_get_all().map(|devices| all(&devices))),
            "free" => gpumem::gpu_mem_get_free().to_string(),
            "try_free" => told(gpumem::try_gpu_mem_get_free()),
            "free_no_cache" => gpumem::gpu_mem_get_free_no_cache().to_string(),
            "try_free_no_cache" => told(gpumem::try_gpu_mem_get_free_no_cache()),
            "used" => gpumem::gpu_mem_get_used().to_string(),
            "try_used" => told(gpumem::try_gpu_mem_get_used()),
            "used_no_cache" => gpumem::gpu_mem_get_used_no_cache().to_string(),
            "try_used_no_cache" => told(gpumem::try_gpu_mem_get_used_no_cache()),
            "max_free" => most_free(gpumem::gpu_with_max_free_mem()),
            "try_max_free" => told(gpumem::try_gpu_with_max_free_mem().map(most_free)),
            "preload" => {
                gpumem::preload();
                "done".to_owned()
            }
            "try_preload" => told(gpumem::try_preload().map(|()| "done")),
            "available" => gpumem::is_available().to_string(),
            "count" => gpumem::device_count().to_string(),
            "try_count" => told(gpumem::try_device_count()),
            "current" => told(gpumem::current_device()),
            "name" => told(gpumem::device_name(device(argument)?)),
            "handle" => told(GpuHandle::new(device(argument)?).map(|handle| {
                self.handle = Some(handle);
                "found"
            })),
            "fast" => gpumem::gpu_mem_get_used_fast(self.handle.as_ref().ok_or("there is no handle")?).to_string(),
            "try_fast" => told(gpumem::try_gpu_mem_get_used_fast(self.handle.as_ref().ok_or("there is no handle")?)),
            _ => return Ok(None),
        }))
    }

    /// What is done with traces.
    fn trace(&mut self, verb: &str, argument: &str) -> Result<Option<String>, Trouble> {
        let trace = self.traces.last_mut();
        Ok(Some(match verb {
            "new" => {
                self.traces.push(GpuMemTrace::new());
                "started".to_owned()
            }
            "build" => {
                let builder = GpuMemTrace::builder();
                let started = match device(argument)? {
                    Some(device) => builder.device(device).start(),
                    None => builder.start(),
                };
                told(started.map(|trace| {
                    self.traces.push(trace);
                    "started"
                }))
            }
            "report" => {
                trace.ok_or("there is no trace")?.report();
                "done".to_owned()
            }
            "data" => {
                let data = trace.ok_or("there is no trace")?.data();
                format!(
                    "device={} used={} peaked={} gauge={} stale={}",
                    data.device,
                    data.used.get(),
                    data.peaked.get(),
                    data.gauge,
                    data.stale
                )
            }
            "reset" => {
                trace.ok_or("there is no trace")?.reset();
                "done".to_owned()
            }
            "stop" => {
                trace.ok_or("there is no trace")?.stop();
                "done".to_owned()
            }
            "drop" => {
                self.traces.pop();
                "done".to_owned()
            }
            _ => return Ok(None),
        }))
    }

    /// What happens around them.
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
            "give_back" => {
                self.blocks.clear();
                for stream in &self.streams {
                    stream.synchronize()?;
                }
                "done".to_owned()
            }
            "capture" => {
                // One that waits for the legacy stream, as CUDA's own are by default and cudarc's are not.
                let stream = stream::create(StreamKind::Default)?;
                // SAFETY: the stream was just created, and is not destroyed while this process runs.
                unsafe { stream::begin_capture(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL) }?;
                self.captured = Some(stream);
                "begun".to_owned()
            }
            "end_capture" => {
                let stream = self.captured.take().ok_or("there is no capture")?;
                // SAFETY: the stream was created by `capture` and lives on.
                match unsafe { stream::end_capture(stream) } {
                    Ok(_) => "whole".to_owned(),
                    Err(error) => format!("broken: {error}"),
                }
            }
            "await" => self.wait_for(argument)?,
            "other_thread" => thread::scope(|scope| {
                let answer = scope.spawn(|| Self::default().run(argument).map_err(|trouble| trouble.to_string()));
                answer.join().unwrap_or_else(|_| Err("the thread panicked".to_owned()))
            })?,
            "sleep" => {
                thread::sleep(Duration::from_millis(argument.parse::<u32>()?.into()));
                "slept".to_owned()
            }
            "threads" => threads()?.to_string(),
            _ => return Ok(None),
        }))
    }

    fn wait_for(&self, what: &str) -> Result<String, Trouble> {
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let stale = self.traces.last().map(|trace| trace.data().stale);
            let is_so = match what {
                "stale" => stale == Some(true),
                "fresh" => stale == Some(false),
                "readable" => gpumem::try_gpu_mem_get(None).is_ok(),
                "a_thread" => threads()? == 1,
                "no_threads" => threads()? == 0,
                _ => return Err("no such thing to wait for".into()),
            };
            if is_so {
                return Ok("so".to_owned());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Err("waited in vain".into())
    }
}

/// How long to wait for what should come soon, on a machine that may be busy.
const PATIENCE: Duration = Duration::from_secs(10);

/// `0`, or nothing for the current device.
fn device(argument: &str) -> Result<Option<u32>, Trouble> {
    if argument.is_empty() { Ok(None) } else { Ok(Some(argument.parse()?)) }
}

fn told<T: Display>(result: Result<T, Error>) -> String {
    match result {
        Ok(value) => value.to_string(),
        Err(error) => {
            let flags = [
                ("unavailable", error.is_unavailable()),
                ("unknown device", error.is_unknown_device()),
                ("invalid setting", error.is_invalid_setting()),
                ("out of memory", error.is_out_of_memory()),
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

fn most_free((device, free): (Option<u32>, gpumem::Bytes)) -> String {
    format!("{device:?} {free}")
}

fn threads() -> io::Result<usize> {
    let mut count = 0;
    for task in fs::read_dir("/proc/self/task")? {
        // A thread may end while we look.
        let name = fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
        count += usize::from(name.starts_with("gpumem"));
    }
    Ok(count)
}

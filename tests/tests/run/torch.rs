//! Tests `gpumem run --torch`, with a stand-in for PyTorch on the stand-in driver.

use gpumem_tests::{built, interpreters, output_of};
use serde_json::Value;

use super::*;

/// A training program: it allocates and frees tensors of many sizes, and empties the cache once. Some steps use a private pool.
const TRAIN: &str = "\
import json, os, random, sys
if 'cuda first' in sys.argv:
    import ctypes
    ctypes.CDLL('libcuda.so.1').cuInit(0)
import torch
empty = torch.cuda.empty
weights = [empty(3 << 20) for _ in range(4)]
random.seed(1)
def step():
    kept = []
    for number in range(20):
        kept.append(empty(random.choice([100, 5000, 1 << 20, (1 << 20) + 1, 7 << 20, 11 << 20, 30 << 20])))
        if random.random() < 0.5:
            kept.pop(random.randrange(len(kept)))
for number in range(8):
    torch._C._pool = (0, int(2 < number < 6))
    step()
    if number == 4:
        torch.cuda.empty_cache()
largest = empty(200 << 20)
facts = {'allocated': torch.cuda.memory_allocated(), 'max_allocated': torch.cuda.max_memory_allocated()}
facts['reserved'] = torch.cuda.max_memory_reserved()
print(json.dumps(facts), flush=True)
exec(os.environ.get('AT_THE_END', ''))
";

/// A training program whose network has two equal layers and a head. Each step has activations, temporary tensors, gradients, and
/// states of the optimizer.
const MODULES: &str = "\
import json
import torch
from torch.cuda import empty
MIB = 1 << 20
class Layer(torch.nn.Module):
    def __init__(self):
        self.weight = empty(4 * MIB)
    def forward(self, kept):
        temporary = empty(16 * MIB)
        kept.append(empty(8 * MIB))
class Net(torch.nn.Module):
    def __init__(self):
        self.h = [Layer(), Layer()]
        self.head = Layer()
    def forward(self, images, kept, labels):
        for layer in self.h:
            layer(kept)
        try:
            Failing()(kept)
        except ValueError:
            pass
        self.head(kept)
class Failing(torch.nn.Module):
    def forward(self, kept):
        raise ValueError
net = Net()
parameters = [layer.weight for layer in [*net.h, net.head]]
optimizer = torch.optim.optimizer.Optimizer(parameters)
def backward(kept):
    for parameter in parameters:
        work = empty(32 * MIB)
        parameter.grad = empty(4 * MIB)
        kept.pop()
for step in range(3):
    images, labels, kept = empty(2 * MIB), empty(2 * MIB), []
    net(images, kept, labels=labels)
    kept.append(empty(MIB))
    torch.autograd.backward([lambda: backward(kept)])
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
parameters[0].grad = empty(4 * MIB)
print(json.dumps({'max_allocated': torch.cuda.max_memory_allocated()}), flush=True)
";

struct Run {
    folder: Folder,
    outcome: Outcome,
}

impl Run {
    fn of(options: &[&str], machine: &Standin, python: &[&str]) -> Option<Self> {
        let interpreter = interpreters().into_values().next()?;
        Some(Self::with(&interpreter, options, machine, python))
    }

    fn with(interpreter: &Path, options: &[&str], machine: &Standin, python: &[&str]) -> Self {
        Self::of_program(TRAIN, interpreter, options, machine, python)
    }

    fn of_program(program: &str, interpreter: &Path, options: &[&str], machine: &Standin, python: &[&str]) -> Self {
        let folder = Folder::new();
        let [file, script] = ["a.capture", "train.py"].map(|name| folder.file(name));
        fs::write(&script, program).unwrap();
        let interpreter = interpreter.to_str().expect("the path is text").to_owned();
        let machine = machine.clone().env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/python/site-packages"));
        let arguments = [&["run"], options, &["-o", &file, "--", &interpreter, &script], python].concat();
        let outcome = machine.run_program(&built("gpumem-command"), &arguments);
        Self { folder, outcome }
    }

    fn said(&self, name: &str) -> u64 {
        let line = self.outcome.stdout.lines().find(|line| line.starts_with('{')).unwrap_or_default();
        let facts: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}\n{}", self.outcome));
        facts[name].as_u64().unwrap()
    }

    fn json(&self, options: &[&str]) -> Value {
        let name = self.folder.names().into_iter().find(|name| name.ends_with(".capture")).expect("it was recorded");
        let file = self.folder.file(&name);
        let arguments = [&["report", "--json"], options, &[&file]].concat();
        let outcome = machine().run_program(&built("gpumem-command"), &arguments);
        assert!(outcome.is_clean(), "{outcome}");
        serde_json::from_str(&outcome.stdout).unwrap()
    }

    /// Checks the reason why there are no tensors.
    #[track_caller]
    fn has_none(&self, why: &str) {
        assert!(self.outcome.stderr.contains(why), "{why}\n{}", self.outcome);
        assert_eq!(self.outcome.stderr.matches("PyTorch").count(), 1, "{}", self.outcome);
        assert_eq!(self.folder.names(), ["a.capture", "train.py"]);
    }
}

#[test]
fn tensors_come_to_what_pytorch_says() {
    let first = [&[][..], &["cuda first"]];
    // The latest Python runs the program both ways. The others run it only the first way.
    let ways = interpreters().into_values().rev().zip(1..).flat_map(|(python, number)| {
        first.iter().take(if number == 1 { 2 } else { 1 }).map(move |first| (python.clone(), *first))
    });
    for (python, first) in ways {
        let run = Run::with(&python, &["--torch"], &machine(), first);
        assert!(run.outcome.is_clean(), "{}", run.outcome);
        assert_eq!(run.folder.names(), ["a.capture", "train.py"], "{}", run.outcome);
        let report = run.json(&[]);
        let torch = &report["torch"];
        assert_eq!(torch["allocator"], "PyTorch 2.11.0");
        let device = &torch["devices"][0];
        assert_eq!(device["known_from_seconds"], Value::Null, "{device:#}");
        assert_eq!(device["peak"]["allocated_bytes"], run.said("max_allocated"));
        assert_eq!(device["at_end"]["allocated_bytes"], run.said("allocated"));
        assert_eq!(device["said"]["max_memory_allocated"], run.said("max_allocated"));
        // The peak of the driver's blocks is the memory of the allocator.
        assert_eq!(report["devices"][0]["peak_bytes"], run.said("reserved"));
        let at_peak = &device["at_device_peak"];
        assert_eq!(at_peak["reserved_bytes"], run.said("reserved"));
        let part = |name: &str| at_peak[name].as_u64().unwrap();
        let parts = [
            "requested_bytes",
            "rounding_bytes",
            "awaiting_bytes",
            "unused_beside_tensors_bytes",
            "unused_segments_bytes",
            "unused_of_other_streams_bytes",
            "unused_in_private_pools_bytes",
        ];
        assert_eq!(parts.into_iter().map(part).sum::<u64>(), run.said("reserved"), "{at_peak:#}");
        // The lines are the program's.
        let largest = &device["peak"]["by_place"][0];
        assert!(largest["line"].as_str().unwrap().ends_with("train.py:20"), "{largest:#}");
        assert_eq!(largest["bytes"], 200 << 20);
        for part in [
            "PyTorch 2.11.0, device 0: tensors had ",
            "train.py:20",
            "from the driver: asked for ",
            "unused in private pools of graphs 114 MiB (24 %)",
            "fits     a request of at most 30 MiB without a new segment: 144 MiB are unused, in 8 pieces",
        ] {
            assert!(run.outcome.stderr.contains(part), "{part}\n{}", run.outcome);
        }
        assert!(!run.outcome.stderr.contains("contradicts"), "{}", run.outcome);
        check_snapshot(&run);
        // PyTorch names the pools of the segments that it has at the end.
        let segments = &run.json(&["--at", "end"])["torch"][0]["segments"];
        let pools: Vec<_> = segments.as_array().unwrap().iter().map(|segment| &segment["pool"]).collect();
        assert!(pools.iter().any(|pool| **pool == 0) && pools.iter().all(|pool| pool.is_u64()), "{segments:#}");
        check_replay(&run, "a.capture");
        // The weights and the largest tensor are live at the end.
        let leaks = run.json(&["--leaks"]);
        assert_eq!(leaks["torch"][0]["tensors"], 5);
        assert_eq!(run.json(&["--at", "start"])["torch"][0]["tensors"], 0);
    }
}

#[test]
fn modules_and_classes_come_to_what_the_program_has() {
    // A free-threaded Python may free tensors of the backward pass later, because it runs on a thread of its own. The peak is then higher.
    for python in interpreters()
        .into_iter()
        .filter(|((_, _, is_free_threaded), _)| *is_free_threaded == 0)
        .map(|(_, python)| python)
    {
        let run = Run::of_program(MODULES, &python, &["--modules"], &machine(), &[]);
        assert!(run.outcome.is_clean(), "{}", run.outcome);
        let report = run.json(&[]);
        let peak = &report["torch"]["devices"][0]["peak"];
        assert_eq!(peak["allocated_bytes"], run.said("max_allocated"), "{peak:#}");
        let sums = |of: &Value, name: &str| {
            let sum = |sum: &Value| (sum[name].as_str().map(str::to_owned), sum["bytes"].as_u64().unwrap() >> 20);
            of.as_array().unwrap_or_else(|| panic!("{of:#}")).iter().map(sum).collect::<Vec<_>>()
        };
        let requested = |sum: &Value| sum["requested_bytes"].as_u64().unwrap();
        assert_eq!(peak["by_class"].as_array().unwrap().iter().map(requested).sum::<u64>(), peak["requested_bytes"]);
        let some = |name: &str| Some(name.to_owned());
        // In the backward pass of the second step, these tensors are live: three weights and three states of the optimizer, one
        // gradient, the temporary tensors of two layers, the activations of three layers, and the inputs.
        assert_eq!(
            sums(&peak["by_class"], "class"),
            [
                (some("temporary (backward)"), 64),
                (some("activations"), 24),
                (some("weights"), 12),
                (some("optimizer"), 12),
                (some("gradients"), 4),
                (some("inputs"), 4),
            ],
            "{peak:#}"
        );
        assert_eq!(
            sums(&peak["by_module"], "module"),
            [(None, 64), (some("Net.h.0 … 1"), 36), (some("Net.head"), 16), (some("Net"), 4)],
            "{peak:#}"
        );
        // No step followed this gradient.
        let end = sums(&report["torch"]["devices"][0]["at_end"]["by_class"], "class");
        assert!(end.contains(&(some("gradients"), 4)), "{end:?}");
        // At the end, only the optimizer refers to its state.
        let held = run.json(&["--leaks"])["torch"][0]["held"].clone();
        let by: Vec<_> = held.as_array().unwrap().iter().map(|held| held["by"].as_str().unwrap()).collect();
        assert!(by.iter().any(|by| by.contains("images in __main__")), "{held:#}");
        assert!(by.iter().any(|by| by.contains("weight") && by.contains("Net.head: Layer")), "{held:#}");
        assert!(by.iter().any(|by| by.contains("momentum")), "{held:#}");
        for part in ["h.0 … 1 Layer (2×)", "temporary (backward)"] {
            assert!(run.outcome.stderr.contains(part), "{part}\n{}", run.outcome);
        }
    }
}

/// Autocast copies the weight of 32 bits, and keeps the copy for the rest of the pass. The other weight has 16 bits.
const AUTOCAST: &str = "\
import torch
from torch.cuda import empty
MIB = 1 << 20
torch.is_autocast_enabled = lambda: True
casts = []
class Layer(torch.nn.Module):
    def __init__(self, dtype):
        self.weight = empty(64 * MIB)
        self.weight.dtype = dtype
    def forward(self):
        casts.append(empty(32 * MIB))
        return empty(32 * MIB)
class Net(torch.nn.Module):
    def __init__(self):
        self.layers = [Layer('torch.float32'), Layer('torch.bfloat16')]
    def forward(self):
        for layer in self.layers:
            layer()
        casts.clear()
net = Net()
for _ in range(2):
    net()
";

#[test]
fn what_autocast_keeps_is_a_class_of_its_own() {
    let Some(python) = python() else { return };
    let run = Run::of_program(AUTOCAST, python.as_ref(), &["--modules"], &machine(), &[]);
    assert!(run.outcome.is_clean(), "{}", run.outcome);
    let peak = &run.json(&[])["torch"]["devices"][0]["peak"];
    let sum = |sum: &Value| (sum["class"].as_str().unwrap().to_owned(), sum["bytes"].as_u64().unwrap() >> 20);
    let sums: Vec<_> = peak["by_class"].as_array().unwrap().iter().map(sum).collect();
    let expected = [("weights", 128), ("temporary (forward)", 64), ("weights cast by autocast", 32)];
    assert_eq!(sums, expected.map(|(class, mib)| (class.to_owned(), mib)), "{peak:#}");
    // The path of the module does not mention autocast.
    let modules = peak["by_module"].as_array().unwrap();
    assert_eq!(modules[0]["module"], "Net.layers.0 … 1", "{peak:#}");
}

/// Most of these tensors are local variables of functions that have ended, but something keeps the frames of the functions.
const ALIVE: &str = "\
import concurrent.futures
import sys
import torch
from torch.cuda import empty
MIB = 1 << 20
class Net(torch.nn.Module):
    def forward(self, mib):
        hidden = empty(mib * MIB)
        return self.head(hidden)
    def head(self, hidden):
        raise ValueError('wrong shape')
net = Net()
failures, tracebacks, frames, loaders, futures, errors = [], [], [], [], [], {}
for _ in range(2):
    try:
        net(60)
    except ValueError as error:
        failures.append(error)
try:
    try:
        net(55)
    except ValueError as error:
        raise RuntimeError from error
except RuntimeError as error:
    errors['step'] = [error]
def outer():
    grid = empty(50 * MIB)
    inner()
def inner():
    try:
        raise IndexError
    except IndexError as error:
        sys.last_value = error
outer()
def cycle():
    rows = empty(45 * MIB)
    try:
        raise KeyError
    except KeyError as error:
        saved = error
import gc
gc.disable()
cycle()
try:
    net(40)
except ValueError as error:
    tracebacks.append(error.__traceback__)
def framed():
    batch = empty(35 * MIB)
    frames.append(sys._getframe())
framed()
def load():
    batch = empty(30 * MIB)
    yield
loaders.append(load())
next(loaders[0])
future = concurrent.futures.Future()
futures.append(future)
try:
    net(25)
except ValueError as error:
    future.set_exception(error)
del future
class Strange:
    def __getattr__(self, name):
        return self
strange = Strange()
strange.value = empty(22 * MIB)
";

#[test]
fn what_keeps_the_frame_of_a_function_alive_is_followed_to_a_name() {
    const HIDDEN: &str = ", keeps hidden of forward (train.py:9), hidden of head (train.py:11)";
    const VALUE: &str = "through the traceback of a ValueError";
    for python in interpreters().into_values() {
        let run = Run::of_program(ALIVE, &python, &["--modules"], &machine(), &[]);
        assert!(run.outcome.is_clean(), "{}", run.outcome);
        let held = run.json(&["--leaks"])["torch"][0]["held"].clone();
        let by = |held: &Value| (held["bytes"].as_u64().unwrap() >> 20, held["by"].as_str().unwrap().to_owned());
        let by: Vec<_> = held.as_array().unwrap().iter().map(by).collect();
        let expected = [
            (60, format!("list failures in __main__, {VALUE}{HIDDEN}")),
            (60, format!("list failures in __main__, {VALUE}{HIDDEN}")),
            (56, format!("RuntimeError in list step in errors in __main__, {VALUE}{HIDDEN}")),
            (
                50,
                "last_value in sys, through the traceback of an IndexError, keeps grid of outer (train.py:28)"
                    .to_owned(),
            ),
            (
                46,
                "saved of cycle (train.py:40), a cycle that gc.collect() frees, through the traceback of a KeyError, \
                 keeps rows of cycle (train.py:40)"
                    .to_owned(),
            ),
            (40, format!("list tracebacks in __main__, through a traceback{HIDDEN}")),
            (36, "list frames in __main__, through a frame, keeps batch of framed (train.py:50)".to_owned()),
            (30, "list loaders in __main__, through a generator, keeps batch of load (train.py:54)".to_owned()),
            (26, format!("_exception of Future in list futures in __main__, {VALUE}{HIDDEN}")),
            (22, "value of Strange strange in __main__".to_owned()),
        ];
        assert_eq!(by, expected);
    }
}

/// The backward passes: one with an operation in C++ and an operation in Python, one inside another pass, one that fails, two at
/// the same time, and one with a checkpoint.
const BACKWARD: &str = "\
import threading
import torch
from torch.autograd import backward
from torch.autograd.function import BackwardCFunction
from torch.cuda import empty
from torch.utils.checkpoint import checkpoint
kept = [empty(2 << 20)]
def operation(mib):
    return lambda: kept.append(empty(mib << 20))
def custom():
    kept.append(empty(12 << 20))
    backward([operation(14)])
def failing():
    raise ValueError
def step():
    backward([operation(16), BackwardCFunction(custom)])
step()
try:
    backward([operation(18), failing])
except ValueError:
    print(torch.autograd._engine_run_backward.__name__, 'raised')
barrier = threading.Barrier(2)
def allocating(mib):
    return [lambda: barrier.wait(), operation(mib), lambda: barrier.wait()]
def at_once(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
waiting = [lambda: barrier.wait()] * 2
at_once(lambda: backward(allocating(20)),
        lambda: backward(waiting))
at_once(*[lambda operations=operations: backward(operations) for operations in (allocating(22), waiting)])
def block():
    kept.append(empty(10 << 20))
backward([checkpoint(block)])
";

#[test]
fn the_backward_pass_is_on_the_line_that_started_it() {
    for (python, option) in
        interpreters().into_values().flat_map(|python| [(python.clone(), "--torch"), (python, "--modules")])
    {
        let run = Run::of_program(BACKWARD, &python, &[option], &machine(), &[]);
        assert!(run.outcome.is_clean() && run.outcome.stdout == "_engine_run_backward raised\n", "{}", run.outcome);
        let report = run.json(&[]);
        let text = |value: &Value| value.as_str().map(|text| text.rsplit('/').next().unwrap_or_default().to_owned());
        let place = |sum: &Value| (sum["bytes"].as_u64().unwrap() >> 20, text(&sum["line"]), text(&sum["caller"]));
        let places = report["torch"]["devices"][0]["peak"]["by_place"].as_array().unwrap();
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            places.iter().map(place).collect::<Vec<_>>(),
            [
                (22, some("train.py:32 (backward pass)"), None),
                // Two passes run at the same time, so either of two lines may have allocated this.
                (20, None, None),
                (18, some("train.py:19 (backward pass)"), None),
                (16, some("train.py:16 (backward pass)"), some("train.py:17")),
                (14, some("train.py:12 (backward pass)"), some("train.py:16")),
                (12, some("train.py:11 (backward pass)"), some("train.py:16")),
                (10, some("train.py:34 (recomputed for a checkpoint)"), some("train.py:35")),
                (2, some("train.py:7"), None),
            ]
        );
    }
}

/// A `DataLoader` copies to pinned memory on a separate thread.
const PINNING: &str = "\
import threading
import torch
from torch.utils.data._utils.pin_memory import _pin_memory_loop
torch.cuda.empty(1)
thread = threading.Thread(target=_pin_memory_loop, args=([8 << 20],))
thread.start()
thread.join()
";

#[test]
fn memory_of_a_pin_thread_says_so() {
    let Some(python) = python() else { return };
    let run = Run::of_program(PINNING, python.as_ref(), &[], &machine(), &[]);
    assert!(run.outcome.is_clean(), "{}", run.outcome);
    let places = run.json(&["--table"]);
    let pinned = places["places"].as_array().unwrap().iter().find(|place| place["allocated_bytes"] == 8 << 20);
    let pinned = pinned.unwrap_or_else(|| panic!("{places:#}"))["place"].as_str().unwrap();
    assert!(pinned.ends_with(" (pin thread of a DataLoader)"), "{pinned}");
}

#[test]
fn modules_are_missing_for_a_reason() {
    let machine = machine().env("TORCH_STANDIN", "without metadata");
    let Some(run) = Run::of(&["--modules"], &machine, &[]) else { return };
    let why = "The modules of PyTorch 2.11.0 are not in the recording: it is older than 2.10.";
    assert!(run.outcome.stderr.contains(why), "{}", run.outcome);
    assert_eq!(run.json(&[])["torch"]["devices"][0]["peak"]["by_module"], Value::Null);
}

/// A file like those that `torch.compile` writes and runs.
const COMPILED: &str = "\
import ctypes
driver = ctypes.CDLL('libcuda.so.1')
empty_strided_cuda = driver.cuMemAlloc_v2
class triton_poi_fused_gelu_0:
    run = lambda *arguments, stream: None
class Runner:
    def call(self, args):
        buf0 = empty_strided_cuda(args, ctypes.c_size_t(64 << 20))
        triton_poi_fused_gelu_0.run(buf0, stream=0)
driver.cuInit(0)
context = ctypes.c_void_p()
driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
driver.cuCtxSetCurrent(context)
Runner().call(ctypes.byref(ctypes.c_void_p()))
";

#[test]
fn memory_of_a_compiled_kernel_has_the_name_of_the_kernel() {
    let Some(python) = python() else { return };
    let folder = Folder::new();
    let cache = folder.file("torchinductor_ada");
    fs::create_dir(&cache).unwrap();
    let [file, compiled] = [folder.file("a.capture"), format!("{cache}/cabcdefghijklmnop.py")];
    fs::write(&compiled, COMPILED).unwrap();
    let outcome = run(&machine(), &file, &[&python, &compiled]);
    assert!(outcome.is_clean(), "{outcome}");
    // The reader of a recording does not have the compiled file.
    fs::remove_dir_all(&cache).unwrap();
    let outcome = machine().run_program(&built("gpumem-command"), &["report", "--calls", &file]);
    assert!(outcome.stdout.contains("\n triton_poi_fused_gelu_0 (compiled: cabcdefg….py:8)   64 "), "{outcome}");
}

/// Checks a snapshot as a reader of PyTorch's snapshots would, and prints its allocated and reserved bytes.
const READ: &str = "\
import json, pickle, sys
snapshot = pickle.load(open(sys.argv[1], 'rb'))
blocks = [block for segment in snapshot['segments'] for block in segment['blocks']]
assert all(sum(b['size'] for b in s['blocks']) == s['total_size'] for s in snapshot['segments'])
live = {}
for event in snapshot['device_traces'][0]:
    if event['action'] == 'alloc':
        assert event['frames'][0]['filename'].endswith('train.py'), event
        live[event['addr']] = event['size']
    elif event['action'] == 'free_requested':
        assert live.pop(event['addr']) == event['size'], event
active = {b['address']: b['requested_size'] for b in blocks if b['state'] == 'active_allocated'}
assert live == active, (live, active)
print(json.dumps({'allocated': sum(b['size'] for b in blocks if b['state'] == 'active_allocated'),
                  'reserved': sum(s['total_size'] for s in snapshot['segments'])}))
";

/// Checks that the file of `--format torch` contains the tensors inside their segments.
#[track_caller]
fn check_snapshot(run: &Run) {
    let [file, snapshot] = ["a.capture", "a.pickle"].map(|name| run.folder.file(name));
    let arguments = ["report", "--format", "torch", "-o", &snapshot, &file];
    let outcome = machine().run_program(&built("gpumem-command"), &arguments);
    assert!(outcome.is_clean(), "{outcome}");
    let python = interpreters().into_values().next().expect("it ran before");
    let read = output_of(std::process::Command::new(python).args(["-c", READ, &snapshot]));
    let facts: Value = serde_json::from_slice(&read.stdout)
        .unwrap_or_else(|error| panic!("{error}\n{}\n{}", String::from_utf8_lossy(&read.stderr), run.outcome));
    let at_end = &run.json(&[])["torch"]["devices"][0]["at_end"];
    assert_eq!(facts["allocated"], run.said("allocated"));
    assert_eq!(facts["reserved"], at_end["reserved_bytes"]);
    fs::remove_file(&snapshot).unwrap();
}

/// Replays the recorded requests in the model of PyTorch's allocator. The model must reserve as much as the stand-in for PyTorch
/// reserved.
#[track_caller]
fn check_replay(run: &Run, file: &str) {
    let outcome = machine().run_program(&built("gpumem-command"), &["what-if", "--json", &run.folder.file(file)]);
    assert!(outcome.is_clean(), "{outcome}");
    let answer: Value = serde_json::from_str(&outcome.stdout).expect("it is JSON");
    let modelled = &answer["modelled"];
    assert_eq!(modelled["has_settings"], true);
    for key in [&modelled["reserved_bytes"], &modelled["replayed_bytes"], &answer["rows"][0]["most_bytes"]] {
        assert_eq!(*key, run.said("reserved"), "{answer:#}");
    }
}

/// The snapshot that a program saves at its end has the same peak as its recording.
#[test]
fn a_snapshot_says_what_the_recording_says() {
    const SAVE: &str = "\
import pickle
pickle.dump(torch.cuda.memory._snapshot(), open(sys.argv[0].replace('train.py', 'own.pickle'), 'wb'), protocol=2)
";
    let Some(run) = Run::of(&["--torch"], &machine().env("AT_THE_END", SAVE), &[]) else { return };
    let snapshot = run.folder.file("own.pickle");
    let outcome = machine().run_program(&built("gpumem-command"), &["report", "--json", &snapshot]);
    assert!(outcome.is_clean(), "{outcome}");
    let own: Value = serde_json::from_str(&outcome.stdout).expect("it is JSON");
    assert_eq!(own["torch"]["devices"][0]["peak"]["allocated_bytes"], run.said("max_allocated"));
    assert_eq!(own["devices"][0]["peak_bytes"], run.said("reserved"));
    check_replay(&run, "own.pickle");
    for moment in ["peak", "at_end"] {
        let [own, recorded] = [&own, &run.json(&[])].map(|report| report["torch"]["devices"][0][moment].clone());
        for key in ["tensors", "allocated_bytes", "requested_bytes", "reserved_bytes", "unused_segments_bytes"] {
            assert_eq!(own[key], recorded[key], "{moment}: {key}");
        }
    }
}

#[test]
fn an_old_history_that_is_full_is_known_from_its_start_on() {
    let Some(run) = Run::of(&["--torch", "--torch-events", "1000"], &machine().env("AT_THE_END", LONG), &[]) else {
        return;
    };
    assert!(run.outcome.is_clean(), "{}", run.outcome);
    let device = &run.json(&[])["torch"]["devices"][0];
    assert!(device["known_from_seconds"].as_f64().unwrap() > 0.0);
    // The live memory of that moment is known: the weights, `largest`, and the segments.
    assert_eq!(device["at_end"]["allocated_bytes"], device["said"]["memory_allocated"]);
    assert_eq!(device["at_end"]["reserved_bytes"], device["said"]["memory_reserved"]);
    assert!(run.outcome.stderr.contains("Tensors on device 0 are known from "), "{}", run.outcome);
    check_replay(&run, "a.capture");
}

const LONG: &str = "for _ in range(500): empty(5 << 20)";

#[test]
fn tensors_are_missing_for_a_reason() {
    let run = |machine: Standin, why: &str| {
        let Some(run) = Run::of(&["--torch"], &machine, &[]) else { return };
        run.has_none(why);
    };
    run(
        machine().env("AT_THE_END", "os._exit(0)"),
        "The tensors of PyTorch 2.11.0 are not in the recording: the process ended",
    );
    run(machine().env("AT_THE_END", "os.kill(os.getpid(), 9)"), "(it was killed, or called os._exit or exec)");
    run(machine().env("TORCH_STANDIN", "old"), "it is older than 2.1");
    run(machine().env("TORCH_STANDIN", "async"), "its allocator is cudaMallocAsync, which keeps no history");
    let off = "torch.cuda.memory._record_memory_history(None, 'all')";
    run(machine().env("AT_THE_END", off), "the program itself has switched the history off");
}

#[test]
fn a_program_without_pytorch_is_recorded_as_ever() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let outcome = run_with(&machine(), &["--torch"], &file, &ALLOCATES);
    assert!(outcome.is_clean(), "{outcome}");
    let line = "gpumem: --torch had nothing to record: no recorded process has used PyTorch with CUDA\n";
    assert_eq!(outcome.stderr.matches(line).count(), 1, "{outcome}");
    assert_eq!(recorded(&file), of_allocates());
    assert_eq!(folder.names(), ["a.capture"]);
}

/// The recording starts and ends while PyTorch is in use.
#[test]
fn tensors_of_a_part_of_the_run_are_known_from_its_start_on() {
    let Some(python) = interpreters().into_values().next() else { return };
    let folder = Folder::new();
    let [file, script, ready, started, done, stopped] =
        ["a.capture", "serve.py", "ready", "begun", "done", "stopped"].map(|name| folder.file(name));
    let wait = "def wait(path):\n    while not os.path.exists(path):\n        time.sleep(0.01)\n";
    let program = format!(
        "import os, time\nimport torch\n{wait}older = torch.cuda.empty(3 << 20)\nopen('{ready}', 'w').write(str(os.getpid()))\n\
         wait('{started}')\ntime.sleep(0.05)\nkept = torch.cuda.empty(7 << 20)\nbig = torch.cuda.empty(40 << 20)\nopen('{done}', 'w')\n\
         wait('{stopped}')\nlater = torch.cuda.empty(90 << 20)\nprint('ended')\n"
    );
    fs::write(&script, program).unwrap();
    let gpumem = built("gpumem-command").display().to_string();
    let until = |file: &str| format!("while [ ! -s {file} ]; do sleep 0.01; done");
    let exists = |file: &str| format!("while [ ! -e {file} ]; do sleep 0.01; done");
    let script = format!(
        "{gpumem} run --dormant --torch -o {file} -- {} {script} & {}; pid=$(cat {ready}); {gpumem} start $pid; \
         echo > {started}; {}; {gpumem} stop $pid; echo > {stopped}; wait",
        python.display(),
        until(&ready),
        exists(&done),
    );
    let machine = machine().env("XDG_RUNTIME_DIR", folder.0.path());
    let machine = machine.env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/python/site-packages"));
    let outcome = machine.run_program("/bin/sh".as_ref(), &["-c", &script]);
    assert!(outcome.is_clean() && outcome.stdout.contains("ended\n"), "{outcome}");
    let run = Run { folder, outcome };
    let report = run.json(&[]);
    let device = &report["torch"]["devices"][0];
    assert!(device["known_from_seconds"].as_f64().is_some(), "{report:#}\n{}", run.outcome);
    // Tensors from before the recording are known, because they are live at its end. Tensors from after it are not in the
    // recording.
    assert_eq!(device["at_end"]["allocated_bytes"], 50 << 20, "{report:#}");
    assert_eq!(device["at_end"]["reserved_bytes"], 60 << 20, "{report:#}");
    // Of the driver's blocks, the recording contains only the one that was allocated during it.
    assert_eq!(report["devices"][0]["peak_bytes"], 40 << 20);
    assert!(report["missing"]["begins_after_seconds"].as_f64().is_some());
}

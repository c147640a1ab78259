//! Estimates the memory of a step before it runs.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::PathBuf,
};

use clap::Args;
use gpumem_core::{
    export::{InPaint, Paint},
    model::{Bytes, one_line},
    report::counted,
};
use gpumem_driver::settings::size;
use gpumem_estimate::{
    AllocatorKind, ContextSize, Described, Dtype, Error, Estimate, Input, Model, Optimizer, Quantized, Savings, Shape,
    Step, TensorSum,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    exit::Exit, failure::Failure, progress::working, recording::why_not_replaceable, terminal, values::recording,
};

const EXAMPLES: &str = "\
Examples:
  gpumem estimate config.json --length 2048 --dtype bf16
  gpumem estimate config.json --train adam --batch 8 --savings
  gpumem estimate config.json --train adam --fit 80GiB
  gpumem estimate model.safetensors
  gpumem estimate config.json --train adam --record estimate.capture";

/// Estimates the peak of a PyTorch training or inference step, without a GPU.
///
/// This needs only a description of the model, not its weights.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct EstimateArguments {
    /// A `config.json` of Hugging Face or its folder, a GGUF or safetensors file, or a model as JSON or TOML.
    model: PathBuf,
    /// The inputs of a step.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// The tokens of each input, for language models. Without this option: 512.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    length: Option<u64>,
    /// A training step with this optimizer: sgd, momentum, adam (or adamw), adafactor, lion or adam8bit. Without this option:
    /// inference.
    #[arg(long, value_name = "OPTIMIZER", value_parser = named::<Optimizer>)]
    train: Option<Optimizer>,
    /// The type of the parameters: f32, f16, bf16 or others. With `int8`, `nf4`, `q4_0` and the like, only weights use it (with `int8` and
    /// `nf4`, only those of linear layers), and all else uses the type in the files, or bf16. Without this option: the type in the files.
    #[arg(long, value_name = "TYPE")]
    dtype: Option<Dtype>,
    /// Autocast to this type.
    #[arg(long, value_name = "TYPE")]
    autocast: Option<Dtype>,
    /// Recompute each block in the backward pass (activation checkpointing).
    #[arg(long)]
    checkpointing: bool,
    /// The allocator: `pytorch`, `pytorch_expandable`, `stream_ordered` or `exact`.
    #[arg(long, default_value = "pytorch", value_name = "NAME", value_parser = named::<AllocatorKind>)]
    allocator: AllocatorKind,
    /// Settings of the step as a JSON file, instead of the options above. `--json` prints them as `step`.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["batch", "train", "dtype", "autocast", "checkpointing", "allocator"],
    )]
    step: Option<PathBuf>,
    /// Look for the largest batch and the longest inputs that fit on a GPU with this much free memory, such as 80GiB (80GB means the same).
    #[arg(long, value_name = "MEMORY", value_parser = size)]
    fit: Option<Bytes>,
    /// For --fit: the memory of the process outside of the allocator. Without this option, the value that was measured
    /// with PyTorch 2.11 on an H200.
    #[arg(long, value_name = "MEMORY", requires = "fit", value_parser = size)]
    context: Option<Bytes>,
    /// Show what changes of the step would save.
    #[arg(long)]
    savings: bool,
    /// Write the events of the step as a recording, which the other commands read.
    #[arg(long, value_name = "FILE", value_parser = recording())]
    record: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The largest step that fits on a GPU. The field names are those in JSON.
#[derive(Serialize)]
struct Fit {
    memory: Bytes,
    context: Bytes,
    /// See [`MARGIN`].
    margin_percent: u64,
    /// The memory that remains for the allocator.
    #[serde(rename = "left")]
    limit: Bytes,
    batch: u64,
    /// The memory that a batch of one input needs, if even that does not fit.
    least: Option<Bytes>,
    /// `None` if all inputs have the same size.
    length: Option<u64>,
    /// True if the model does not support longer inputs.
    #[serde(rename = "length_is_all_positions")]
    is_longest: bool,
}

/// A step, and the source of its compute type.
#[derive(Serialize)]
struct StepRequest {
    step: Step,
    dtype_from: &'static str,
    /// The type that the file names, if gpumem does not know it.
    #[serde(skip)]
    unknown_dtype: Option<String>,
}

/// The printed result. The field names are those in JSON.
#[derive(Serialize)]
struct Answer<'a> {
    model: &'a str,
    input: &'a Input,
    #[serde(flatten)]
    request: &'a StepRequest,
    computes_in: Dtype,
    /// The longest sequences that the model supports, if that is known.
    positions: Option<u64>,
    /// Numbers that are given neither in the file nor by an option.
    assumed: BTreeMap<String, u64>,
    /// Remarks about a step that is unusual but can be estimated.
    notes: Vec<String>,
    estimate: Estimate,
    #[serde(skip_serializing_if = "Option::is_none")]
    savings: Option<Savings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fit: Option<Fit>,
}

/// The printed result for a file whose model is not known.
#[derive(Serialize)]
struct WeightsAnswer {
    by_dtype: BTreeMap<String, TensorSum>,
    by_module: BTreeMap<String, TensorSum>,
    /// `null`, because everything except the weights is unknown.
    estimate: Option<Estimate>,
    weights: TensorSum,
    /// The peaks of two known models with the sizes in the file.
    range: Option<[Bytes; 2]>,
}

/// Parses a value from the name that it has in files.
fn named<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(Value::String(text.to_ascii_lowercase())).map_err(|error| error.to_string())
}

pub(super) fn execute(arguments: &EstimateArguments) -> Result<Exit, Failure> {
    let file = &arguments.model;
    // The error also contains the path of the file, which may be inside a folder.
    let own = format!("{}: ", file.display());
    let wrong = |error: Error| {
        let why = error.to_string();
        Failure::new(format!("`{}` cannot be used", file.display()), why.strip_prefix(&own).unwrap_or(&why), "")
    };
    // Opening a pipe would wait for a writer.
    if file.metadata().is_ok_and(|known| !known.is_file() && !known.is_dir()) {
        return Err(Failure::new(
            format!("`{}` cannot be used", file.display()),
            "it is neither a file nor a folder",
            "",
        ));
    }
    if let Some((to, why)) = arguments.record.as_ref().and_then(|to| Some((to, why_not_replaceable(to)?))) {
        let what = format!("the recording cannot be written to `{}`", to.display());
        return Err(Failure::new(what, why, "use another --record"));
    }
    let described = match arguments.length {
        Some(length) => Described::read(file, length),
        None => Described::read_up_to(file, LENGTH),
    };
    let described = described.map_err(wrong)?;
    let Described { tensors, model, takes_length, dtype, unknown_dtype, positions, mut assumed, notes, .. } = described;
    let is_doubtful = !notes.is_empty();
    for note in notes {
        terminal::error(&format_args!("`{}`: {note}", file.display()));
    }
    let model = match model {
        Ok(model) => model,
        Err(why) => {
            let as_json = arguments.json;
            let [by_dtype, by_module] = [tensors.by_dtype(), tensors.by_module(2)];
            let ranged = described.stand_ins.and_then(|[low, high]| {
                let StepRequest { step, .. } = request(arguments, dtype).ok()?;
                let peaks = [step.estimate(&low).ok()?.peak, step.estimate(&high).ok()?.peak];
                let what = if step.optimizer.is_some() { "training" } else { "inference" };
                Some((peaks, format!("{what}, {}", inputs(step.batch, &low.input))))
            });
            let (weights, range) = (tensors.sum(), ranged.as_ref().map(|(range, _)| *range));
            let weights = WeightsAnswer { by_dtype, by_module, estimate: None, weights, range };
            terminal::answer(as_json, &weights, |out, paint| {
                writeln!(out, "{}", InPaint(&tensors, paint))?;
                ranged.as_ref().map_or(Ok(()), |(range, what)| write_range(out, *range, what))
            })?;
            let next = "describe the model as JSON or TOML";
            terminal::error(&Failure::new(format!("`{}` cannot be estimated", file.display()), why, next));
            return Ok(Exit::Failed);
        }
    };
    let failed = |error: Error| Failure::new(format!("`{}` cannot be estimated", file.display()), error, "");
    let request = StepRequest { unknown_dtype, ..request(arguments, dtype)? };
    let step = &request.step;
    let (estimate, recording) = working("estimating", || match &arguments.record {
        None => Ok((step.estimate(&model).map_err(failed)?, None)),
        Some(to) => {
            let (estimate, recording) = step.record(&model).map_err(failed)?;
            Ok((estimate, Some((to, recording))))
        }
    })?;
    let savings = arguments.savings.then(|| working("estimating changes of the step", || step.savings(&model)));
    let savings = savings.transpose().map_err(failed)?;
    let fitting =
        |memory| working("looking for the largest step that fits", || fit(memory, arguments.context, step, &model));
    let fit = arguments.fit.map(fitting).transpose()?;
    let notes = [beyond(&model, step, positions), assumed_sizes(&assumed)].into_iter().flatten().collect();
    let length = match &model.input {
        Input::Tokens(length) | Input::Pair { target: length, .. } | Input::NumbersAndTokens { target: length, .. } => {
            Some(*length)
        }
        _ => None,
    };
    if let Some(length) = length.filter(|_| arguments.length.is_none() && takes_length) {
        assumed.insert("length".to_owned(), length);
    }
    let (name, input, computes_in) = (&*model.name, &model.input, step.computes_in());
    let answer = Answer {
        model: name,
        input,
        request: &request,
        computes_in,
        positions,
        assumed,
        notes,
        estimate,
        savings,
        fit,
    };
    // The conversion sorts the keys by name.
    let json = serde_json::to_value(&answer).unwrap_or_default();
    terminal::answer(arguments.json, &json, |out, paint| answer.as_text(out, paint))?;
    if let Some((to, recording)) = recording {
        terminal::write_file(to, |out| out.write_all(&recording))?;
    }
    if let Some(why) = answer.fit.as_ref().and_then(Fit::why_nothing) {
        terminal::error(&why);
        return Ok(Exit::LimitExceeded);
    }
    Ok(if is_doubtful { Exit::Failed } else { Exit::Done })
}

/// Writes the peaks of known decoders that have the sizes of an unknown one.
fn write_range(out: &mut dyn Write, [low, high]: [Bytes; 2], what: &str) -> io::Result<()> {
    let [low, high] = [low, high].map(|peak| peak.to_string());
    if low == high {
        return writeln!(out, "\na known decoder with these sizes has a peak of {low}: {what}");
    }
    writeln!(out, "\na known decoder with these sizes has a peak of {low} to {high}: {what}")?;
    writeln!(out, "The lower peak is with attention in one kernel, the higher one with stored scores.")
}

/// Returns the step that the options or the file describe. `stored` is the type of the parameters in the files.
fn request(arguments: &EstimateArguments, stored: Option<Dtype>) -> Result<StepRequest, Failure> {
    if let Some(file) = &arguments.step {
        let own = format!("{}: ", file.display());
        let step = Step::read(file).map_err(|error| {
            let why = error.to_string();
            Failure::new(format!("`{}` is not a step", file.display()), why.strip_prefix(&own).unwrap_or(&why), "")
        })?;
        return Ok(StepRequest { step, dtype_from: "step", unknown_dtype: None });
    }
    let step = Step {
        batch: arguments.batch,
        optimizer: arguments.train,
        autocast: arguments.autocast,
        checkpointing: arguments.checkpointing.into(),
        allocator: arguments.allocator,
        ..Step::default()
    };
    let parameters = arguments.dtype.or(stored).unwrap_or_default();
    if !parameters.is_only_stored() {
        let dtype_from = match (arguments.dtype, stored) {
            (Some(_), _) => "option",
            (None, Some(_)) => "file",
            (None, None) => "default",
        };
        return Ok(StepRequest { step: Step { parameters, ..step }, dtype_from, unknown_dtype: None });
    }
    // Only weights have such a type. Everything else has the other type of the files.
    let wide = stored.filter(|dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16));
    let dtype_from = if wide.is_some() { "file" } else { "default" };
    let compute = wide.unwrap_or(Dtype::Bf16);
    let of_bitsandbytes = match parameters.to_string().as_str() {
        "nf4" | "fp4" => Some(false),
        "nf4_nested" => Some(true),
        _ => None,
    };
    let step = match of_bitsandbytes {
        Some(double) => {
            Step { parameters: compute, quantized: Some(Quantized { double, compute, ..Quantized::default() }), ..step }
        }
        None => Step { parameters, compute: Some(compute), ..step },
    };
    Ok(StepRequest { step, dtype_from, unknown_dtype: None })
}

/// Returns the remark about sequences that are longer than the model supports.
fn beyond(model: &Model, step: &Step, positions: Option<u64>) -> Option<String> {
    let (Input::Tokens(length), Some(positions)) = (&model.input, positions) else { return None };
    let tokens = length.saturating_add(step.decode.as_ref().map_or(0, |decode| decode.tokens));
    let what = format!("the model was made for {positions} positions, and the inputs have {tokens} tokens");
    (tokens > positions).then_some(what)
}

/// The length of inputs if the option is missing.
const LENGTH: u64 = 512;

/// Returns the remark about sizes that the file does not contain.
fn assumed_sizes(assumed: &BTreeMap<String, u64>) -> Option<String> {
    let sizes: Vec<_> = assumed.iter().map(|(key, size)| format!("{key} = {size}")).collect();
    let what = "not in the file, so the defaults of the Python class are assumed";
    (!sizes.is_empty()).then(|| format!("{what}: {}; set them in the file", sizes.join(", ")))
}

/// How much memory is left free, in percent. A step that fits must be able to run, although estimates are not exact.
const MARGIN: u64 = 2;

fn fit(memory: Bytes, context: Option<Bytes>, step: &Step, model: &Model) -> Result<Fit, Failure> {
    let measured = || ContextSize::measured((9, 0)).map(|size| size.high);
    let context = context.or_else(measured).unwrap_or_default();
    let limit = memory.checked_sub(context).unwrap_or_default();
    let limit = Bytes::new(limit.get() / 100 * (100 - MARGIN));
    let limited = Step { limit: Some(limit), ..step.clone() };
    let failed = |error: Error| Failure::new("the largest step that fits cannot be found", error, "");
    let batch = limited.largest_batch(model).map_err(failed)?;
    let has_length = matches!(model.input, Input::Tokens(_));
    let length = has_length.then(|| limited.largest_length(model)).transpose().map_err(failed)?;
    let is_longest = length.is_some_and(|length| {
        let longer = Model { input: Input::Tokens(length.saturating_add(1)), ..model.clone() };
        limited.estimate(&longer).is_err_and(|error| !error.is_out_of_memory())
    });
    // The limit is for the memory that the allocator gets from the driver.
    let alone = || Step { batch: 1, limit: None, ..step.clone() }.estimate(model).map(|estimate| estimate.reserved);
    let least = (batch == 0).then(alone).transpose().map_err(failed)?;
    Ok(Fit { memory, context, margin_percent: MARGIN, limit, batch, least, length, is_longest })
}

impl Fit {
    /// Returns why not even one input fits.
    fn why_nothing(&self) -> Option<String> {
        let Self { memory, context, limit, least, length, .. } = self;
        let least = least.as_ref()?;
        let what =
            if length.is_some_and(|length| length > 0) { "no input of this length fits" } else { "nothing fits" };
        let beside = format!("the CUDA context with libraries ({context}) and a margin of {MARGIN} %");
        Some(format!("{what}: one needs {least}, and of {memory}, {limit} are left after {beside}"))
    }
}

/// Returns text such as `3 inputs of 512 tokens`.
fn inputs(count: u64, input: &Input) -> String {
    let inputs = counted(count, "input", "inputs");
    let tokens = |count: u64| counted(count, "token", "tokens");
    let sizes = |shape: &Shape| shape.sizes().iter().map(u64::to_string).collect::<Vec<_>>().join(" × ");
    match input {
        Input::Tokens(length) => format!("{inputs} of {}", tokens(*length)),
        Input::Pair { source, target } => format!("{inputs} of {} and {target} for the decoder", tokens(*source)),
        Input::Numbers(shape) => format!("{inputs} of {} numbers", sizes(shape)),
        Input::NumbersAndTokens { numbers, target } => {
            format!("{inputs} of {} numbers and {} for the decoder", sizes(numbers), tokens(*target))
        }
        _ => inputs,
    }
}

impl StepRequest {
    /// Returns the types of the step, and why it computes in that type.
    fn types(&self) -> String {
        let Self { step, dtype_from, unknown_dtype } = self;
        let [of_all, of_rest] = match (*dtype_from, unknown_dtype) {
            ("file", _) => [", as the file says", " (the type of the file)"].map(str::to_owned),
            ("default", Some(unknown)) => {
                let why = format!("the file says `{}`, which is not known", one_line(unknown));
                [format!(", because {why}"), format!(" ({why})")]
            }
            ("default", None) => {
                [", because the file names none", " (the file names no type for it)"].map(str::to_owned)
            }
            _ => [String::new(), String::new()],
        };
        let weights = match step.parameters {
            _ if step.quantized.is_some() => "weights of linear layers in 4 bits".to_owned(),
            Dtype::I8 => "weights of linear layers in 8 bits".to_owned(),
            stored if stored.is_only_stored() => format!("weights in {stored}"),
            parameters => return format!("parameters in {parameters}{of_all}"),
        };
        format!("{weights}, all else in {}{of_rest}", step.computes_in())
    }
}

impl Answer<'_> {
    fn as_text(&self, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
        let Self { model, input, request, notes, estimate, savings, fit, .. } = self;
        let estimate = InPaint(estimate, paint).to_string();
        // The first line is the peak. The step is inserted after it, followed by the parts of the peak.
        let (peak, parts) = estimate.split_once('\n').unwrap_or((&estimate, ""));
        let what = if request.step.optimizer.is_some() { "training" } else { "inference" };
        let (name, inputs) = (one_line(model), inputs(request.step.batch, input));
        writeln!(out, "{peak}\n{name}: {what}, {inputs}")?;
        if let Some(length) = self.assumed.get("length") {
            let positions = self.positions.filter(|positions| positions > length);
            let positions = positions.map(|positions| format!(" (the model was made for up to {positions})"));
            writeln!(out, "--length was not given: {length} tokens are assumed{}", positions.unwrap_or_default())?;
        }
        writeln!(out, "{}", request.types())?;
        for note in notes {
            writeln!(out, "{note}")?;
        }
        if let Some(fit) = fit {
            self.fit_as_text(out, fit)?;
        }
        writeln!(out, "\n{parts}")?;
        if let Some(savings) = savings {
            writeln!(out, "\n{}", InPaint(savings, paint))?;
        }
        Ok(())
    }

    fn fit_as_text(&self, out: &mut dyn Write, fit: &Fit) -> io::Result<()> {
        let Fit { memory, context, limit, batch, least, length, is_longest, .. } = fit;
        let of_batch = self.request.step.batch;
        writeln!(out, "\nwith {memory}: the CUDA context and libraries take {context}, and {MARGIN} % stay free")?;
        match least {
            Some(least) => {
                writeln!(out, "  not even {} fits: it needs {least}, and {limit} are left", inputs(1, self.input))?;
            }
            None => writeln!(out, "  the largest batch is {}", inputs(*batch, self.input))?,
        }
        match length {
            None => {}
            Some(0) => writeln!(out, "  not even inputs of one token fit in a batch of {of_batch}")?,
            Some(length) => {
                let why = match self.positions {
                    _ if *is_longest => " (all of its positions)".to_owned(),
                    Some(positions) if *length > positions => format!(" (it was made for {positions} positions)"),
                    _ => String::new(),
                };
                let tokens = counted(*length, "token", "tokens");
                writeln!(out, "  the longest inputs of a batch of {of_batch} have {tokens}{why}")?;
            }
        }
        Ok(())
    }
}

//! Estimates the memory of a step before it runs.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::Args;
use gpumem_core::{
    export::{InPaint, Paint},
    model::{Bytes, one_line},
};
use gpumem_estimate::{
    AllocatorKind, ContextSize, Described, Dtype, Error, Estimate, Input, Model, Optimizer, Savings, Step, TensorSum,
    Tensors,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::{
    arguments::recording, exit::Exit, failure::Failure, history::is_recording, progress::working, size::size, terminal,
};

const EXAMPLES: &str = "\
Examples:
  gpumem estimate config.json --length 2048 --dtype bf16
  gpumem estimate config.json --train adam --batch 8 --savings
  gpumem estimate config.json --train adam --fit 80GiB
  gpumem estimate model.safetensors
  gpumem estimate config.json --train adam --record estimate.capture";

/// Estimates the peak of a training or inference step of PyTorch, without a GPU.
///
/// It needs a description of the model, and no weights.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// A `config.json` of Hugging Face or its folder, a GGUF or safetensors file, or a model as JSON or TOML.
    model: PathBuf,
    /// The inputs of a step.
    #[arg(long, default_value_t = 1, value_name = "N")]
    batch: u64,
    /// The tokens of each input, for models of language.
    #[arg(long, default_value_t = 512, value_name = "N")]
    length: u64,
    /// A training step with this optimizer: sgd, momentum, adam, adafactor, lion or adam8bit. Without it: inference.
    #[arg(long, value_name = "OPTIMIZER", value_parser = named::<Optimizer>)]
    train: Option<Optimizer>,
    /// The type of the parameters: f32, f16, bf16 or others. Without it, what the files say.
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    dtype: Option<Dtype>,
    /// Autocast to this type.
    #[arg(long, value_name = "TYPE", value_parser = dtype)]
    autocast: Option<Dtype>,
    /// The backward pass runs each block again.
    #[arg(long)]
    checkpointing: bool,
    /// The allocator: `pytorch`, `pytorch_expandable`, `stream_ordered`, `exact`, or `cubecl=80GiB` with the memory of the card.
    #[arg(long, default_value = "pytorch", value_name = "NAME", value_parser = allocator)]
    allocator: AllocatorKind,
    /// Settings of the step as a JSON file, instead of the options above. `--json` prints them as `step`.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["batch", "train", "dtype", "autocast", "checkpointing", "allocator"],
    )]
    step: Option<PathBuf>,
    /// Look for the largest batch and the longest inputs that fit on a card with this much free memory, such as 80GiB (80GB means the same).
    #[arg(long, value_name = "MEMORY", value_parser = size)]
    fit: Option<Bytes>,
    /// For --fit: what the process has beside the allocator. Without it, what was measured of PyTorch 2.11 on an H200.
    #[arg(long, value_name = "MEMORY", requires = "fit", value_parser = size)]
    context: Option<Bytes>,
    /// Show what changes of the step would save.
    #[arg(long)]
    savings: bool,
    /// Write the events of the step as a recording, which the other commands read.
    #[arg(long, value_name = "FILE", value_parser = recording())]
    record: Option<PathBuf>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// What fits on a card.
struct Fit {
    memory: Bytes,
    context: Bytes,
    batch: u64,
    /// `None`: the inputs have one size.
    length: Option<u64>,
    /// The model has no more positions.
    is_longest: bool,
}

fn dtype(text: &str) -> Result<Dtype, String> {
    text.parse().map_err(|error: Error| format!("{error}; types are f64, f32, f16, bf16, f8, i8, nf4 and others"))
}

fn allocator(text: &str) -> Result<AllocatorKind, String> {
    match text.strip_prefix("cubecl=") {
        Some(card) => Ok(AllocatorKind::Cubecl { card: size(card)? }),
        None => named(text),
    }
}

/// The type that most parameters have in the files, if a model can run in it.
fn stored_type(tensors: &Tensors) -> Dtype {
    let sums = tensors.by_dtype();
    let most = sums.iter().max_by_key(|(_, sum)| sum.elements).and_then(|(name, _)| name.parse().ok());
    most.filter(|dtype| matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16)).unwrap_or_default()
}

/// A value by the name that it has in files.
fn named<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(Value::String(text.to_owned())).map_err(|error| error.to_string())
}

pub(crate) fn execute(arguments: &Arguments) -> Result<Exit, Failure> {
    let file = &arguments.model;
    // The error names the file too, which may be one in a folder.
    let own = format!("{}: ", file.display());
    let wrong = |error: Error| {
        let why = error.to_string();
        Failure::new(format!("`{}` cannot be used", file.display()), why.strip_prefix(&own).unwrap_or(&why), "")
    };
    // A pipe would be waited for.
    if file.metadata().is_ok_and(|known| !known.is_file() && !known.is_dir()) {
        return Err(Failure::new(format!("`{}` cannot be used", file.display()), "it is no file and no folder", ""));
    }
    if let Some(to) = &arguments.record
        && let (Ok(from), Ok(to)) = (file.canonicalize(), to.canonicalize())
        && (to == from || to.starts_with(&from) && to.exists() && !is_recording(&to))
    {
        let next = "name another file";
        return Err(Failure::new("the recording cannot be written", "it would replace what describes the model", next));
    }
    let Described { tensors, model, notes, .. } = Described::read(file, arguments.length).map_err(wrong)?;
    let is_doubtful = !notes.is_empty();
    for note in notes {
        terminal::error(&format_args!("`{}`: {note}", file.display()));
    }
    let model = match model {
        Ok(model) => model,
        Err(why) => {
            let as_json = arguments.json;
            terminal::answer(as_json, &weights_as_json(&tensors), |out, paint| {
                writeln!(out, "{}", InPaint(&tensors, paint))
            })?;
            let next = "describe the model as JSON or TOML";
            terminal::error(&Failure::new(format!("`{}` has no estimate", file.display()), why, next));
            return Ok(Exit::Failed);
        }
    };
    let failed = |error: Error| Failure::new(format!("`{}` cannot be estimated", file.display()), error, "");
    let step = step(arguments, stored_type(&tensors))?;
    let (estimate, recording) = working("estimating", || match &arguments.record {
        None => Ok((step.estimate(&model).map_err(failed)?, None)),
        Some(to) => {
            let (estimate, recording) = step.record(&model).map_err(failed)?;
            Ok((estimate, Some((to, recording))))
        }
    })?;
    let savings = arguments.savings.then(|| working("estimating changes of the step", || step.savings(&model)));
    let savings = savings.transpose().map_err(failed)?;
    let fitting = |memory| working("looking for what fits", || fit(memory, arguments.context, &step, &model));
    let fit = arguments.fit.map(fitting).transpose()?;
    let json = as_json(&model, &step, &estimate, savings.as_ref(), fit.as_ref());
    terminal::answer(arguments.json, &json, |out, paint| {
        as_text(out, paint, (&model, &step, &estimate), savings.as_ref(), fit.as_ref())
    })?;
    if let Some((to, recording)) = recording {
        terminal::write_file(to, |out| out.write_all(&recording)).map_err(|failure| match failure {
            Failure::Failed { what, cause, .. } => {
                Failure::Failed { what, cause, next: "give another --record".to_owned() }
            }
            failure @ Failure::ClosedPipe => failure,
        })?;
    }
    Ok(if is_doubtful { Exit::Failed } else { Exit::Done })
}

fn read(file: &Path) -> Result<String, Failure> {
    fs::read_to_string(file).map_err(|error| Failure::new(format!("`{}` cannot be read", file.display()), error, ""))
}

fn step(arguments: &Arguments, stored: Dtype) -> Result<Step, Failure> {
    let Some(file) = &arguments.step else {
        return Ok(Step {
            batch: arguments.batch,
            optimizer: arguments.train,
            parameters: arguments.dtype.unwrap_or(stored),
            autocast: arguments.autocast,
            checkpointing: arguments.checkpointing.into(),
            allocator: arguments.allocator,
            ..Step::default()
        });
    };
    let wrong = |error| Failure::new(format!("`{}` is no step", file.display()), error, "");
    serde_json::from_str(&read(file)?).map_err(wrong)
}

/// What fits has to run, although an estimate is not exact: this part of the memory is left free, in percent.
const MARGIN: u64 = 2;

fn fit(memory: Bytes, context: Option<Bytes>, step: &Step, model: &Model) -> Result<Fit, Failure> {
    let measured = || ContextSize::measured((9, 0)).map(|size| size.high);
    let context = context.or_else(measured).unwrap_or_default();
    let too_small = || Failure::new(format!("{memory} are too little"), format!("the context has {context}"), "");
    let limit = memory.checked_sub(context).ok_or_else(too_small)?;
    let limit = Bytes::new(limit.get() / 100 * (100 - MARGIN));
    let step = Step { limit: Some(limit), ..step.clone() };
    let failed = |error: Error| Failure::new("what fits cannot be found", error, "");
    let batch = step.largest_batch(model).map_err(failed)?;
    let has_length = matches!(model.input, Input::Tokens(_));
    let length = has_length.then(|| step.largest_length(model)).transpose().map_err(failed)?;
    let is_longest = length.is_some_and(|length| {
        let longer = Model { input: Input::Tokens(length.saturating_add(1)), ..model.clone() };
        step.estimate(&longer).is_err_and(|error| !error.is_out_of_memory())
    });
    Ok(Fit { memory, context, batch, length, is_longest })
}

fn as_text(
    out: &mut dyn Write,
    paint: Paint,
    (model, step, estimate): (&Model, &Step, &Estimate),
    savings: Option<&Savings>,
    fit: Option<&Fit>,
) -> io::Result<()> {
    let length = if let Input::Tokens(length) = model.input { format!(" of {length} tokens") } else { String::new() };
    let inputs = if step.batch == 1 { "input" } else { "inputs" };
    let what = if step.optimizer.is_some() { "training" } else { "inference" };
    let name = one_line(&model.name);
    writeln!(out, "{name}: {what}, {} {inputs}{length}, parameters in {}", step.batch, step.parameters)?;
    writeln!(out, "{}", InPaint(estimate, paint))?;
    if let Some(savings) = savings {
        writeln!(out, "\n{}", InPaint(savings, paint))?;
    }
    if let Some(Fit { memory, context, batch, length, is_longest }) = fit {
        writeln!(out, "\nwith {memory}: the CUDA context and libraries have {context}, and {MARGIN} % stay free")?;
        match batch {
            0 => writeln!(out, "  not even a batch of one input fits")?,
            batch => writeln!(out, "  the largest batch is {batch}")?,
        }
        match length {
            None => {}
            Some(0) => writeln!(out, "  not even inputs of one token fit in a batch of {}", step.batch)?,
            Some(length) => {
                let why = if *is_longest { " (all of its positions)" } else { "" };
                writeln!(out, "  the longest inputs of a batch of {} have {length} tokens{why}", step.batch)?;
            }
        }
    }
    Ok(())
}

fn as_json(model: &Model, step: &Step, estimate: &Estimate, savings: Option<&Savings>, fit: Option<&Fit>) -> Value {
    let estimate: Value = serde_json::from_str(&estimate.to_json()).unwrap_or_default();
    let mut all = json!({"model": model.name, "step": step, "estimate": estimate});
    if let Some(savings) = savings {
        all["savings"] = json!(savings);
    }
    if let Some(Fit { memory, context, batch, length, .. }) = fit {
        all["fit"] =
            json!({"memory": memory, "context": context, "margin_percent": MARGIN, "batch": batch, "length": length});
    }
    all
}

/// What is beside the weights is `null`: it is not known.
fn weights_as_json(tensors: &Tensors) -> Value {
    let sum = tensors.sum();
    let sums = |sums: BTreeMap<String, TensorSum>| -> Value {
        sums.into_iter().map(|(name, sum)| (name, json!({"elements": sum.elements, "bytes": sum.bytes}))).collect()
    };
    json!({
        "weights": {"elements": sum.elements, "bytes": sum.bytes},
        "by_dtype": sums(tensors.by_dtype()),
        "by_module": sums(tensors.by_module(2)),
        "estimate": null,
    })
}

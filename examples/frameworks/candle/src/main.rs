//! A training step with candle, and the GPU memory of its parts: `cargo run --release`.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{AdamW, Linear, Module, Optimizer, VarBuilder, VarMap, linear, loss};
use gpumem::GpuMemTrace;

const EMBED: usize = 512;
const WIDTH: usize = 4096;
const BATCH: usize = 256;
const STEPS: usize = 100;

/// Four hidden layers between an input and an output of 512 numbers.
struct Model(Vec<Linear>);

impl Model {
    fn new(vb: &VarBuilder<'_>) -> Result<Self> {
        let sizes = [EMBED, WIDTH, WIDTH, WIDTH, WIDTH, EMBED];
        let layer = |(at, pair): (usize, &[usize])| linear(pair[0], pair[1], vb.pp(at.to_string()));
        sizes.windows(2).enumerate().map(layer).collect::<Result<_>>().map(Self)
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (last, hidden) = self.0.split_last().expect("the model has layers");
        let x = hidden.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.relu())?;
        last.forward(&x)
    }
}

fn main() -> Result<()> {
    gpumem::preload(); // before the device is created, so that all blocks are known
    let device = Device::new_cuda(0)?;
    let variables = VarMap::new();
    let (model, mut optimizer) = GpuMemTrace::scope("model", |_| {
        let model = Model::new(&VarBuilder::from_varmap(&variables, DType::F32, &device))?;
        Ok::<_, candle_core::Error>((model, AdamW::new_lr(variables.all_vars(), 1e-4)?))
    })?;
    let x = Tensor::randn(0f32, 1.0, (BATCH, EMBED), &device)?;

    for at in 0..STEPS {
        // The lines of the first two steps and of the last one are printed.
        let trace = |name| GpuMemTrace::builder().ctx(name).silent(at > 1 && at + 1 < STEPS).start_or_off();
        let _step = trace("step");
        let loss = {
            let _forward = trace("forward");
            loss::mse(&model.forward(&x)?, &x)?
        };
        let gradients = {
            let _backward = trace("backward");
            loss.backward()?
        };
        let _optimizer = trace("optimizer");
        optimizer.step(&gradients)?;
    }
    println!("{}", gpumem::summary());
    Ok(())
}

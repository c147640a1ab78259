//! A training step with tch, and the GPU memory of its parts: `cargo run --release`.

use gpumem::GpuMemTrace;
use tch::{
    Device, Kind, Reduction, Tensor,
    nn::{self, Module, OptimizerConfig},
};

const EMBED: i64 = 512;
const WIDTH: i64 = 4096;
const BATCH: i64 = 256;
const STEPS: usize = 100;

/// Four hidden layers between an input and an output of 512 numbers.
fn model(root: nn::Path<'_>) -> nn::Sequential {
    let sizes = [EMBED, WIDTH, WIDTH, WIDTH, WIDTH, EMBED];
    let mut model = nn::seq();
    for (at, pair) in sizes.windows(2).enumerate() {
        if at > 0 {
            model = model.add_fn(Tensor::relu);
        }
        model = model.add(nn::linear(&root / at, pair[0], pair[1], Default::default()));
    }
    model
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    gpumem_tch::observe()?; // before the first tensor
    let device = Device::Cuda(0);
    let variables = nn::VarStore::new(device);
    let model = GpuMemTrace::scope("model", |_| model(variables.root()));
    let mut optimizer = nn::AdamW::default().build(&variables, 1e-4)?;
    let x = Tensor::randn([BATCH, EMBED], (Kind::Float, device));

    for at in 0..STEPS {
        // The lines of the first two steps and of the last one are printed.
        let trace = |name| GpuMemTrace::builder().ctx(name).silent(at > 1 && at + 1 < STEPS).start_or_off();
        let _step = trace("step");
        let loss = {
            let _forward = trace("forward");
            model.forward(&x).mse_loss(&x, Reduction::Mean)
        };
        {
            let _backward = trace("backward");
            optimizer.zero_grad();
            loss.backward();
        }
        let _optimizer = trace("optimizer");
        optimizer.step();
    }
    println!("{}", gpumem::summary());
    Ok(())
}

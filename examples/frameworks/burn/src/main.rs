//! A training step with burn, and the GPU memory of its parts: `cargo run --release --features cuda`.

use burn::{
    nn::{
        Linear, LinearConfig,
        loss::{MseLoss, Reduction},
    },
    optim::{AdamWConfig, GradientsParams},
    prelude::*,
    tensor::{Distribution, activation::relu},
};
use gpumem_burn::scope;
use tracing_subscriber::prelude::*;

const EMBED: usize = 512;
const WIDTH: usize = 4096;
const BATCH: usize = 256;

/// Four hidden layers between an input and an output of 512 numbers.
#[derive(Module, Debug)]
struct Model {
    layers: Vec<Linear>,
}

impl Model {
    fn new(device: &Device) -> Self {
        let sizes = [EMBED, WIDTH, WIDTH, WIDTH, WIDTH, EMBED];
        let layers: Vec<_> = sizes.windows(2).map(|pair| LinearConfig::new(pair[0], pair[1]).init(device)).collect();
        for layer in &layers {
            layer.weight.val(); // parameters are created at their first use
            layer.bias.as_ref().map(|bias| bias.val());
        }
        Self { layers }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let (last, hidden) = self.layers.split_last().expect("the model has layers");
        last.forward(hidden.iter().fold(x, |x, layer| relu(layer.forward(x))))
    }
}

fn main() {
    tracing_subscriber::registry().with(gpumem_burn::layer()).init();
    gpumem::preload(); // before the device is created, so that all pages are known
    let steps = std::env::args().nth(1).map_or(100, |steps| steps.parse().expect("the number of steps"));
    let device = Device::default().autodiff();

    let mut model = scope(&device, "model", || Model::new(&device));
    let mut optimizer = AdamWConfig::new().init();
    let x = Tensor::<2>::random([BATCH, EMBED], Distribution::Normal(0.0, 1.0), &device);

    for _ in 0..steps {
        model = scope(&device, "step", || {
            let loss = scope(&device, "forward", || {
                MseLoss::new().forward(model.forward(x.clone()), x.clone(), Reduction::Mean)
            });
            let gradients = scope(&device, "backward", || GradientsParams::from_grads(loss.backward(), &model));
            scope(&device, "optimizer", || optimizer.step(1e-4, model, gradients))
        });
    }
    print!("{}", gpumem_burn::summary(&device).expect("a cubecl device"));
}

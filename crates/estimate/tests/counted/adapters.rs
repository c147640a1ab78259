//! Tests adapters and weights in 4 bits. The live bytes are counted by hand, or are numbers that peft and the authors of `QLoRA`
//! published.

use gpumem_estimate::{Class, Dtype, Lora, Model, Optimizer, Quantized, Step};

use super::{classifier, exact, linear, of, phases, small};

fn lora(rank: u64, target: &str) -> Lora {
    Lora { rank, targets: [target].into(), dropout: 0.0 }
}

#[test]
fn a_step_with_an_adapter_byte_by_byte() {
    let step = exact(Step { adapters: Some(lora(4, "fc2")), ..Step::training(8, Optimizer::Adam) });
    let estimate = step.estimate(&small()).unwrap();
    let adapter = 4 * 50 + 50 * 4;
    assert_eq!(estimate.parameters, 7600 + adapter);
    let (output, small_output) = (8 * 50 * 4, 8 * 4 * 4);
    let constant = (7600 + adapter) * 4 + 8 * 100 * 4 + 8 * 8;
    // These are live: the output of `relu`, which the adapter keeps; the outputs of the layer and of both matrices of the
    // adapter; the product of the last output with a number. The first layer keeps nothing.
    assert_eq!(phases(&estimate, "forward")[0], constant + 4 * output + small_output);
    // These are live: the outputs that the adapter keeps, the logarithms, two gradients; the loss and its gradient.
    assert_eq!(phases(&estimate, "backward")[0], constant + 4 * output + small_output + 8);
    // These are live: only the gradients of the adapter, two moments and the roots.
    assert_eq!(phases(&estimate, "update")[0], constant + 4 * adapter * 4 + 4);
}

/// For Llama 2 7B with rank 8 and its default targets, `print_trainable_parameters` of peft prints: "trainable params: 4,194,304
/// || all params: 6,742,609,920".
#[test]
fn parameters_of_llama_are_those_of_peft() {
    // The defaults of Llama's configuration are the sizes of Llama 2 7B.
    let model = Model::from_config(r#"{"architectures": ["LlamaForCausalLM"]}"#, 16).unwrap();
    let adapters = Some(Lora { rank: 8, targets: ["q_proj", "v_proj"].into(), dropout: 0.0 });
    let step = Step { parameters: Dtype::Bf16, adapters, ..Step::training(1, Optimizer::Sgd) };
    let estimate = exact(step).estimate(&model).unwrap();
    assert_eq!(estimate.parameters, 6_742_609_920);
    assert_eq!(phases(&estimate, "update")[0] - estimate.parameter_bytes.get(), 4_194_304 * 4 + 16 * 8 + 4);
}

fn in_4_bits(inputs: u64, outputs: u64) -> Model {
    classifier(inputs, vec![linear(inputs, outputs).named("fc")])
}

#[test]
fn weights_in_4_bits() {
    let step = |double| {
        let quantized = Some(Quantized { double, ..Quantized::default() });
        exact(Step { parameters: Dtype::Bf16, quantized, ..Step::inference(8) })
    };
    let estimate = step(true).estimate(&in_4_bits(128, 64)).unwrap();
    // The weight has half a byte for each element, a table of the 16 numbers that 4 bits stand for, 128 scales of one byte, one
    // scale of these scales, and their mean.
    let weights = 128 * 64 / 2 + 16 * 4 + 128 + 4 + 4;
    assert_eq!(of(&estimate, Class::Weights), weights);
    assert_eq!(estimate.parameters, 128 * 64);
    // These are live: the input, the weight with two bytes for each element, and the output.
    assert_eq!(estimate.peak.get(), weights + 8 * 128 * 2 + 128 * 64 * 2 + 8 * 64 * 2);
    let single = step(false).estimate(&in_4_bits(128, 64)).unwrap();
    assert_eq!(of(&single, Class::Weights), 128 * 64 / 2 + 16 * 4 + 128 * 4);
    // "Double quantization reduces the memory footprint from 0.5 bits to 0.127 bits per parameter" (QLoRA, section 3). The table
    // of 16 numbers and the mean are added to that.
    let large = step(true).estimate(&in_4_bits(4096, 4096)).unwrap();
    let bits = (of(&large, Class::Weights) - 16 * 4 - 4) * 8 * 100_000 / (4096 * 4096);
    assert_eq!(bits, 412_695);
    let large = step(false).estimate(&in_4_bits(4096, 4096)).unwrap();
    assert_eq!((of(&large, Class::Weights) - 16 * 4) * 8 * 1000 / (4096 * 4096), 4500);
    // The head stays as it is.
    let mut head = in_4_bits(128, 64);
    head.layers[0].name = "lm_head".to_owned();
    assert_eq!(of(&step(true).estimate(&head).unwrap(), Class::Weights), 128 * 64 * 2);
}

/// The backward pass widens the weight again, to multiply the gradient with it.
#[test]
fn the_backward_pass_widens_weights() {
    let layer = |name: &str| linear(1024, 1024).named(name);
    let model = classifier(1024, vec![layer("first"), layer("second")]);
    let training = Step::training(1, Optimizer::Sgd);
    let quantized = Some(Quantized::default());
    let step = exact(Step { parameters: Dtype::Bf16, quantized, adapters: Some(lora(2, "*")), ..training });
    let estimate = step.estimate(&model).unwrap();
    let weights = estimate.phases.last().unwrap().peak.get() - 2 * 2 * 2 * 1024 * 4;
    // These are live: the scales of the weight, four bytes each, and the weight, two bytes for each element. All outputs are
    // small.
    let wide = 1024 * 1024 / 64 * 4 + 1024 * 1024 * 2;
    for name in ["forward", "backward"] {
        let added = phases(&estimate, name)[0] - weights;
        assert!((wide..wide + 80_000).contains(&added), "{name}: {added} and {wide}");
    }
}

//! Tests the live memory of steps at the peak, with autocast, with limits, with checkpointing, and with quantized weights.

use gpumem_estimate::{
    Bytes, Checkpointing, Class, Dtype, Input, Layer, Loss, Model, Optimizer, Quantized, Step, models, numbered,
};

use super::{classifier, exact, highest, linear, of, small};

/// Each byte of a small step is counted by hand.
#[test]
fn a_small_step_byte_by_byte() {
    let (batch, weights) = (8, (100 * 50 + 50 + 50 * 50 + 50) * 4);
    let (input, output) = (batch * 100 * 4, batch * 50 * 4);
    let inference = exact(Step::inference(batch)).estimate(&small()).unwrap();
    // Two outputs are live: that of a layer, and that of the layer before it.
    assert_eq!(inference.peak.get(), weights + input + 2 * output);
    assert_eq!(inference.reserved, inference.peak);
    let training = exact(Step::training(batch, Optimizer::Sgd)).estimate(&small()).unwrap();
    let labels = batch * 8;
    let [forward, backward, update] = highest(&training);
    let constant = weights + input + labels;
    // These are live: the output of `relu`, the logits, the logarithms of the probabilities; the loss and its total weight.
    // `relu` keeps its output, so its input is free.
    assert_eq!(forward, constant + 3 * output + 2 * 4);
    // These are live: all gradients, and the gradient that those of the first layer were made from; the loss and its gradient.
    // The input needs no gradient.
    assert_eq!(backward, constant + weights + output + 8);
    assert_eq!(update, constant + weights + 4);
}

#[test]
fn autocast_halves_activations_and_copies_weights() {
    let model = models::gpt2(256);
    let step = exact(Step::training(8, Optimizer::Sgd));
    let wide = step.estimate(&model).unwrap();
    let narrow = Step { autocast: Some(Dtype::Bf16), ..step.clone() }.estimate(&model).unwrap();
    assert!(of(&narrow, Class::Activations) < of(&wide, Class::Activations));
    assert_eq!(of(&narrow, Class::Weights), of(&wide, Class::Weights));
    let inference = Step { autocast: Some(Dtype::Bf16), ..exact(Step::inference(8)) }.estimate(&model).unwrap();
    // Autocast makes copies of two bytes: the weights of all linear layers, tied with the embedding or not, and their biases. The
    // cache also has the keys and values.
    let copies = 2 * (50_257 * 768 + 12 * (12 * 768 * 768 + 9 * 768));
    let keys_and_values = 12 * 2 * 8 * 256 * 768 * 2;
    assert_eq!(of(&inference, Class::Cache), copies + keys_and_values);
}

#[test]
fn the_largest_batch_fits_and_the_next_one_does_not() {
    let model = models::resnet50();
    let step = Step { limit: Some(Bytes::mib(4096)), ..Step::training(1, Optimizer::Sgd) };
    let batch = step.largest_batch(&model).unwrap();
    let fits = Step { batch, ..step.clone() }.estimate(&model).unwrap();
    assert!(fits.reserved <= Bytes::mib(4096));
    let error = Step { batch: batch + 1, ..step.clone() }.estimate(&model).unwrap_err();
    assert!(error.is_out_of_memory() && !error.layer().is_empty(), "{error}");
    assert!(error.to_string().contains("out of memory"), "{error}");
    // Most of the limit is used: one more image is about 80 MiB.
    assert!(fits.peak > Bytes::mib(3500), "{batch}: {}", fits.peak);
    // Not even the weights fit.
    let small = Step { limit: Some(Bytes::mib(64)), ..step.clone() };
    assert_eq!(small.largest_batch(&model).unwrap(), 0);
    let error = Step::default().largest_batch(&model).unwrap_err();
    assert_eq!(error.to_string(), "the largest step depends on a limit, and the step has none");
}

/// Deep models need no deep stack, and their time does not grow faster than the model.
#[test]
fn a_model_of_20_000_layers() {
    let layers = (0..10_000).flat_map(|_| [Layer::linear(4, 4), Layer::relu(false)]);
    let estimate = exact(Step::training(1, Optimizer::Sgd)).estimate(&classifier(4, numbered(layers))).unwrap();
    assert_eq!(estimate.parameters, 10_000 * 20);
    assert!(estimate.peak > Bytes::new(10_000 * 20 * 4 * 2));
}

/// The bytes of Llama 3 8B with 8,192 tokens are computed by hand: the weights, and a cache of keys and values of 8 heads of 128
/// elements in 32 blocks.
#[test]
fn weights_alone_are_quantized() {
    let config = r#"{
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8
    }"#;
    let model = Model::from_config(config, 8192).unwrap();
    let (elements, of_norms) = (8_030_261_248_u64, 65 * 4096);
    let estimate = |step: Step| exact(step).estimate(&model).unwrap();
    let with = |parameters: &str| Step { parameters: parameters.parse().unwrap(), ..Step::inference(1) };
    let wide = estimate(with("bf16"));
    assert_eq!(wide.parameter_bytes.get(), 2 * elements);
    assert_eq!(of(&wide, Class::Cache), 1024 << 20);
    // Each type takes this number of bytes for this number of elements.
    for (name, [bytes, of_elements]) in
        [("q4_0", [18, 32]), ("q4_k", [144, 256]), ("q8_0", [34, 32]), ("f8", [1, 1]), ("nf4", [36, 64])]
    {
        let narrow = estimate(with(name));
        let weights = (elements - of_norms) / of_elements * bytes + of_norms * 2;
        assert_eq!((narrow.parameters, narrow.parameter_bytes.get()), (elements, weights), "{name}");
        // Everything else is as in bf16: the cache has 1,024 MiB, and the peak is smaller by the savings of the weights.
        for (class, bytes) in wide.classes().into_iter().filter(|(class, _)| *class != Class::Weights) {
            assert_eq!(of(&narrow, class), bytes.get(), "{name}: {class:?}");
        }
        assert_eq!(wide.peak.get() - narrow.peak.get(), 2 * elements - weights, "{name}");
    }
    // `load_in_8bit` of bitsandbytes keeps the embedding and the head in bf16.
    let narrow = estimate(with("int8"));
    let linear = elements - of_norms - 2 * 128_256 * 4096;
    assert_eq!((narrow.parameters, narrow.parameter_bytes.get()), (elements, 2 * elements - linear));
    assert_eq!(wide.peak.get() - narrow.peak.get(), linear);
    let wider = estimate(Step { compute: Some(Dtype::F32), ..with("q4_0") });
    assert_eq!(of(&wider, Class::Cache), 2048 << 20);
    let with_autocast = Step { autocast: Some(Dtype::F16), ..with("q4_0") };
    assert_eq!(with_autocast.computes_in(), Dtype::F16);
    assert_eq!(of(&estimate(with_autocast), Class::Cache), 1024 << 20);
    // bitsandbytes keeps the embedding and the head in bf16, and widens each weight to bf16 for its product.
    let quantized = Some(Quantized { double: false, ..Quantized::default() });
    let narrow = estimate(Step { quantized, ..with("bf16") });
    assert_eq!(of(&narrow, Class::Cache), 1024 << 20);
}

/// The blocks are next to the head of a language model, which is not in a block. The input of the head lives until the loss is
/// computed.
#[test]
fn blocks_keep_their_inputs() {
    let block = || Layer::Block { layers: numbered([linear(8, 8), linear(8, 8)]) };
    let layers = numbered([Layer::Embedding { rows: 16, size: 8 }, block(), block(), block(), linear(8, 16)]);
    let model = Model { name: "tokens".to_owned(), input: Input::Tokens(100), layers, loss: Loss::NextToken };
    let peak = |checkpointing| {
        let step = exact(Step { checkpointing, ..Step::training(10, Optimizer::Sgd) });
        step.estimate(&model).unwrap().phases[0].peak.get()
    };
    let output = 10 * 100 * 8 * 4;
    // Each of the three blocks keeps two inputs without checkpointing, and one input with it. The head always keeps its own
    // input.
    assert_eq!(peak(Checkpointing::Off) - peak(Checkpointing::Blocks), 3 * output);
}

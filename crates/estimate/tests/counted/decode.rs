//! Tests the generation of tokens and the accumulation of gradients. The live bytes are counted by hand.

use gpumem_estimate::{Class, Decode, Estimate, KvCache, Optimizer, Step, models};

use super::{exact, phases, small};

fn decode(tokens: u64, cache: KvCache) -> Step {
    Step { decode: Some(Decode { tokens, cache }), ..exact(Step::inference(4)) }
}

/// GPT-2 small keeps 768 keys and 768 values of 4 bytes for each token in each of 12 layers.
const KEYS: u64 = 768 * 4;

#[test]
fn each_token_adds_its_keys_and_values() {
    let model = models::gpt2(128);
    let of = |tokens, cache| decode(tokens, cache).estimate(&model).unwrap();
    let (long, short) = (of(65, KvCache::Dynamic), of(33, KvCache::Dynamic));
    let peak = |estimate: &Estimate| phases(estimate, "decode")[0];
    // The difference is 32 more tokens of 4 sequences: the keys and values of 12 layers, the keys of one layer once more while
    // they are joined, the numbers of the tokens, and their mask.
    assert_eq!(peak(&long) - peak(&short), 32 * 4 * (25 * KEYS + 16));
    assert_eq!(phases(&long, "prefill"), phases(&short, "prefill"));
    // If there is room for all tokens, only the numbers of the tokens and their mask are added.
    let (long, short) = (of(65, KvCache::Static(192)), of(33, KvCache::Static(192)));
    assert_eq!(peak(&long) - peak(&short), 32 * 4 * 16);
    assert_eq!(super::of(&long, Class::Cache), 4 * 192 * 24 * KEYS);
}

/// The first pass makes the gradients. The second pass needs them twice for a moment.
#[test]
fn gradients_are_added_up() {
    let model = small();
    let step = |micro_batches| Step { micro_batches, ..exact(Step::training(8, Optimizer::Sgd)) };
    let estimate = step(2).estimate(&model).unwrap();
    let (weights, output) = ((100 * 50 + 50 + 50 * 50 + 50) * 4, 8 * 50 * 4);
    let constant = weights + 8 * 100 * 4 + 8 * 8;
    let backward = phases(&estimate, "backward");
    // The first pass has the same result as without accumulation.
    assert_eq!(backward[0], constant + weights + output + 8);
    // These are live: the gradients of the first pass; the gradients of the first layer again, and the gradient that they were
    // made from; the loss and its gradient.
    assert_eq!(backward[1], constant + weights + (100 * 50 + 50) * 4 + output + 8);
    let forward = phases(&estimate, "forward");
    // These are live: the output of `relu`, the logits, the logarithms; the loss and its total weight; in the second pass, also
    // the loss of the first pass.
    assert_eq!(forward[..2], [constant + 3 * output + 8, constant + weights + 3 * output + 12]);
    assert_eq!((forward.len(), phases(&estimate, "update").len()), (4, 2), "two steps of two passes");
    assert_eq!(step(100).estimate(&model).unwrap().peak, estimate.peak);
}

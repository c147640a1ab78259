//! Tests steps on several GPUs. The live bytes on one of the GPUs are counted by hand.

use gpumem_estimate::{
    AllocatorKind, Checkpointing, Class, DataParallel, DataParallelKind, Layer, Model, Optimizer, Step, models,
    numbered,
};

use super::{classifier, exact, highest, linear, of, phases, small};

const BATCH: u64 = 4;
/// The bytes of the weight of a block. `HEAD` is those of the last layer.
const WEIGHT: u64 = 64 * 64 * 4;
const HEAD: u64 = 10 * 64 * 4;
/// The output of a block. The input has the same size.
const OUTPUT: u64 = BATCH * 64 * 4;
const LABELS: u64 = BATCH * 8;

/// Returns a model of two blocks, and a layer outside of them.
fn blocks() -> Model {
    let block = || Layer::Block { layers: numbered([linear(64, 64)]) };
    let layers = numbered([block(), block(), linear(64, 10)]);
    classifier(64, layers)
}

fn parallel(kind: DataParallelKind, ranks: u64) -> DataParallel {
    DataParallel { kind, ranks, gathered: None }
}

fn training(optimizer: Optimizer, parallel: DataParallel) -> Step {
    exact(Step { data_parallel: Some(parallel), ..Step::training(BATCH, optimizer) })
}

/// A rank always has half of each parameter, the input and the labels.
const CONSTANT: u64 = WEIGHT + HEAD / 2 + OUTPUT + LABELS;

#[test]
fn shards_are_gathered_block_by_block() {
    let estimate = training(Optimizer::Sgd, parallel(DataParallelKind::Zero3, 2)).estimate(&blocks()).unwrap();
    assert_eq!(estimate.parameters, 2 * 64 * 64 + 640);
    let expected = [
        // At the peak in the second block, these are live: the last layer's weight, which is not in a block; the second block's
        // weight, and the buffer in which it was gathered; the outputs of both blocks.
        CONSTANT + HEAD + 2 * WEIGHT + 2 * OUTPUT,
        // At the peak in the first block, these are live: the last layer's weight and its gradient; the block's weight and its
        // gradient; the gradients of the second block, which are being added up, and the half that is their sum; the gradient of
        // the output; the loss and its gradient.
        CONSTANT + 2 * HEAD + 3 * WEIGHT + WEIGHT / 2 + OUTPUT + 8,
        // In the update, half of all gradients is live.
        CONSTANT + WEIGHT + HEAD / 2 + 4,
    ];
    assert_eq!(highest(&estimate), expected);
}

#[test]
fn shards_are_rounded_up() {
    // With 4 ranks, each has three of 10 rows at most. With 3 ranks, each has 22 of 64 rows at most.
    for (ranks, rows, of_head) in [(4, 16, 3), (3, 22, 4), (100, 1, 1)] {
        let estimate = training(Optimizer::Sgd, parallel(DataParallelKind::Zero3, ranks)).estimate(&blocks()).unwrap();
        let shards = (2 * rows * 64 + of_head * 64) * 4;
        // These are live: weights and gradients.
        assert_eq!(highest(&estimate)[2], 2 * shards + OUTPUT + LABELS + 4, "{ranks} ranks");
    }
}

#[test]
fn replicas_have_buckets() {
    let alone = Step { data_parallel: None, ..training(Optimizer::Sgd, parallel(DataParallelKind::Replicas, 2)) };
    let alone = alone.estimate(&blocks()).unwrap();
    let replicas = training(Optimizer::Sgd, parallel(DataParallelKind::Replicas, 2)).estimate(&blocks()).unwrap();
    let gradients = 2 * WEIGHT + HEAD;
    assert_eq!(highest(&replicas), highest(&alone).map(|bytes| bytes + gradients));
    assert_eq!(of(&replicas, Class::Communication), gradients);
    // `measure/bytes.py` counts the same numbers.
    assert_eq!(highest(&replicas), [74_088, 108_072, 107_044]);
    // With blocks of 512 bytes, the rounding depends on the number of buckets. In the reverse order of VGG19's parameters, the
    // last layer has 16 MB and fills the first bucket, the layer before it has 64 MB, and the one before that has 392 MB. Each of
    // the other layers fills a bucket or shares one.
    let model = models::vgg19();
    let step =
        Step { allocator: AllocatorKind::PyTorch, ..training(Optimizer::Sgd, parallel(DataParallelKind::Replicas, 8)) };
    let communication = of(&step.estimate(&model).unwrap(), Class::Communication);
    assert_eq!(communication, 143_667_240 * 4);
}

/// The parameters have 5000, 50, 2500 and 50 elements. The rank with the most elements updates the first one.
#[test]
fn the_state_is_shared_out_by_parameters() {
    let model = small();
    let update = |kind, ranks| highest(&training(Optimizer::Adam, parallel(kind, ranks)).estimate(&model).unwrap())[2];
    let all = update(DataParallelKind::Replicas, 2);
    // Adam has two moments and roots.
    let saved = |kept: u64| (7600 - kept) * 3 * 4;
    assert_eq!(all - update(DataParallelKind::Zero1, 2), saved(5000));
    assert_eq!(all - update(DataParallelKind::Zero1, 1000), saved(5000));
    // `measure/bytes.py` counts the same numbers in two steps, without the counters of two parameters, which are not on the
    // device.
    let zero1 = training(Optimizer::Adam, parallel(DataParallelKind::Zero1, 2)).estimate(&blocks()).unwrap();
    let peaks: Vec<_> = zero1.phases.iter().map(|phase| phase.peak.get()).collect();
    let second = [111_984, 145_968, 163_884].map(|bytes| bytes - 2 * 4);
    assert_eq!(peaks, [[74_088, 108_072, 163_884 - 2 * 4], second].concat());
    let model = classifier(50, numbered((0..4).map(|_| linear(50, 50))));
    let update = |kind, ranks| highest(&training(Optimizer::Adam, parallel(kind, ranks)).estimate(&model).unwrap())[2];
    // There are four equal parameters for three ranks, so one rank has two.
    let all = update(DataParallelKind::Replicas, 3);
    assert_eq!(all - update(DataParallelKind::Zero1, 3), 2 * 2500 * 3 * 4);
}

#[test]
fn gradients_of_shards_are_added_up() {
    let step = training(Optimizer::Sgd, parallel(DataParallelKind::Zero3, 2));
    let once = step.estimate(&blocks()).unwrap();
    let twice = Step { micro_batches: 2, ..step }.estimate(&blocks()).unwrap();
    assert_eq!(highest(&once)[2], highest(&twice)[2]);
    let backward = phases(&twice, "backward");
    assert_eq!(backward[0], highest(&once)[1]);
    // At the peak in the second block, these are live: the halves of all gradients of the first pass; the last layer's weight and
    // its gradient; the block's weight and its gradient; the buffer of the first block; the outputs of the first block, and two
    // gradients; the loss and its gradient.
    let in_second_block = 2 * HEAD + 3 * WEIGHT + 3 * OUTPUT + 8;
    assert_eq!(backward[1], CONSTANT + WEIGHT + HEAD / 2 + in_second_block);
}

#[test]
fn checkpointed_blocks_are_gathered_once_more_only() {
    let step = training(Optimizer::Sgd, parallel(DataParallelKind::Zero3, 2));
    let checkpointed = Step { checkpointing: Checkpointing::Blocks, ..step.clone() };
    let model = models::gpt2(64);
    let (all, checkpointed) = (step.estimate(&model).unwrap(), checkpointed.estimate(&model).unwrap());
    assert!(highest(&checkpointed)[0] < highest(&all)[0]);
    assert_eq!(highest(&checkpointed)[2], highest(&all)[2]);
    // Nothing stays gathered: the step has the same half of the parameters and gradients as without checkpointing, and the next
    // step starts in the same way.
    assert_eq!(checkpointed.phases[0].peak, checkpointed.phases[3].peak);
}

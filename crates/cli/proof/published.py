"""Rows of published tables of GPU memory, each with the program that repeats it: `table.py` predicts and measures them.

A measurement is in MiB, as the source shows it. An estimator's error is a part of that measurement: -0.1 is 10 % too low.
"""

from collections import namedtuple

from harness import GIB, MIB, program

# `title` is the sentence above the rows. `is_process` is false if the source measured what PyTorch's allocator had reserved.
Table = namedtuple("Table", "title is_process")
# `measured` is None if the source has no such row; `gpus` is the number of GPUs that the program needs.
Row = namedtuple("Row", "table name measured errors command gpus", defaults=[1])

TABLES = {
    "gpumemnet": Table(
        "GPUMemNet ([repository](https://github.com/itu-rad/GPUMemNet), arXiv 2602.17817): f32, Adam, published for an A100 with 40 GB; "
        "images of 224 × 224, Inception 299 × 299, and 512 tokens",
        True,
    ),
    "xmem": Table(
        "xMem ([repository](https://github.com/Stone-ResearchLife/xMem), arXiv 2510.21048): f32, batch 1, 128 tokens, published for an A100 "
        "with 40 GB",
        True,
    ),
    "xmem_small": Table("xMem, seven of its 5,040 runs on an RTX 3060: f32, images of 86 × 86 and 128 tokens", True),
    "torchtitan": Table(
        "torchtitan ([repository](https://github.com/pytorch/torchtitan), `benchmarks`): Llama 3.1 8B with FSDP, 8,192 tokens, selective "
        "checkpoints, published for H100s with 96 GB; what PyTorch reserved",
        False,
    ),
}


def run(name, /, **settings):
    return program(name, file="published_programs.py", **settings)


def gpumemnet():
    # The batches 32, 64 and 128: nvidia-smi, FakeTensor and Horus, in MiB. Horus has no value for 64.
    images = {
        "vgg16": ((8222, 13642, 24408), (3121, 5379, 9894), (21526, None, 82120)),
        "resnet50": ((5262, 8536, 15120), (2673, 5337, 10666), (7904, None, 28923)),
        "mobilenet_v2": ((4544, 7224, 12578), (2425, 4846, 9686), (3617, None, 12028)),
        "efficientnet_b0": ((4958, 7844, 13832), (2730, 5455, 10905), (3865, None, 12999)),
        "inception_v3": ((6346, 10560, 19018), (1590, 3158, 6298), (5990, None, 21289)),
    }
    for model, figures in images.items():
        size = {"size": 299} if model == "inception_v3" else {}
        for batch, measured, fake_tensor, horus in zip((32, 64, 128), *figures):
            errors = errors_of(measured, FakeTensor=fake_tensor, Horus=horus)
            yield Row("gpumemnet", f"{model}-{batch}", measured, errors, run("vision", name=model, batch=batch, **size))
    # nvidia-smi and Horus, in MiB.
    words = {
        ("bert_base", 32): (20774, 17457),
        ("bert_large", 8): (13568, 13349),
        ("xlnet_base", 8): (9718, 3662),
        ("xlnet_large", 4): (14546, 5325),
        ("gpt2_large", 8): (27902, 127677),
        ("gpt2_xl", 2): (36206, 22847),
    }
    for (model, batch), (measured, horus) in words.items():
        command = run("language", name=model, batch=batch, tokens=512)
        yield Row("gpumemnet", f"{model}-{batch}", measured, errors_of(measured, Horus=horus), command)


def errors_of(measured, **estimates):
    return {name: estimate / measured - 1 for name, estimate in estimates.items() if estimate}


def xmem():
    # NVML in bytes, and the errors of xMem and DNNMem in percent. DNNMem has no value for some models.
    large = {
        ("qwen3_4b", "Adafactor"): (36_712_742_912, -4.3, -44.6),
        ("qwen3_4b", "SGD"): (36_704_354_304, -4.4, -44.6),
        ("deepseek_1_5b", "Adafactor"): (16_290_676_736, 0.7, None),
        ("deepseek_1_5b", "SGD"): (15_229_517_824, 1.4, -34.8),
        ("gemma2_2b", "Adafactor"): (28_512_878_592, -13.1, None),
        ("llama3_2_3b", "Adafactor"): (30_742_151_168, -9.1, -48.6),
        ("llama3_2_3b", "SGD"): (30_618_419_200, -3.7, -56.1),
    }
    for (model, optimizer), (measured, *errors) in large.items():
        errors = {name: error / 100 for name, error in zip(("xMem", "DNNMem"), errors) if error is not None}
        command = run("language", name=model, batch=1, tokens=128, optimizer=optimizer)
        yield Row("xmem", f"{model}-{optimizer.lower()}", measured / MIB, errors, command)
    # NVML, xMem, DNNMem, SchedTune and LLMem, in bytes. LLMem is only for language models.
    small = {
        ("convnext_base", 300, "AdamW"): (10_521_411_584, 10_808_721_408, 6_872_367_104, 8_087_289_200, None),
        ("convnext_tiny", 700, "Adam"): (11_045_699_584, 11_154_751_488, 7_824_474_112, 8_850_956_615, None),
        ("convnext_tiny", 700, "SGD"): (11_031_019_520, 11_140_071_424, 7_824_474_112, 8_850_956_615, None),
        ("mnasnet1_0", 600, "RMSprop"): (5_081_399_296, 5_291_114_496, 4_932_501_504, 5_556_823_654, None),
        ("distilgpt2", 30, "AdamW"): (7_377_780_736, 7_958_691_840, 5_119_148_032, 2_544_138_977, 1_836_056_576),
        ("gpt_neo_125m", 20, "AdamW"): (7_547_650_048, 7_300_186_112, 6_081_740_800, 3_855_037_235, 9_530_507_264),
        ("cerebras_111m", 20, "Adam"): (5_909_774_336, 5_916_065_792, 4_726_980_608, 3_855_037_235, 2_045_771_776),
    }
    for (model, batch, optimizer), (measured, xmem, dnnmem, schedtune, llmem) in small.items():
        errors = errors_of(measured, xMem=xmem, DNNMem=dnnmem, SchedTune=schedtune, LLMem=llmem)
        settings = {"name": model, "batch": batch, "optimizer": optimizer}
        classes = {"classes": 10} if model == "mnasnet1_0" else {}
        command = run("language", tokens=128, **settings) if llmem else run("vision", size=86, **classes, **settings)
        yield Row("xmem_small", f"{model}-{batch}-{optimizer.lower()}", measured / MIB, errors, command)


def torchtitan():
    # A single process, whose collectives move nothing.
    for ranks, gib in ((8, 82.4), (128, 67.0)):
        yield Row("torchtitan", f"rank_of_{ranks}-2", gib * GIB / MIB, {}, run("llama", batch=2, fake=ranks))
    # These are not in the table, because it has no rows for so few GPUs.
    for gpus, batch in ((2, 1), (4, 2)):
        yield Row("torchtitan", f"nccl_{gpus}-{batch}", None, {}, run("llama", ranks=gpus, batch=batch), gpus)


ROWS = {f"{row.table}-{row.name}": row for rows in (gpumemnet(), xmem(), torchtitan()) for row in rows}

# Rows that are not repeated: what they are, the published value, and why.
FLOAT8 = "float8 of torchao, and 8 GPUs or more"
APART = [
    ("GPUMemNet: xception, batch 32, 64 and 128", "7,202, 11,520 and 22,978 MiB", "the model is timm's, which is not used here"),
    ("torchtitan: 8B on 8 GPUs, compiled; with float8", "77.0; 76.8 GiB", "8 GPUs"),
    ("torchtitan: 8B on 128 GPUs, compiled; with float8", "62.0; 61.8 GiB", "128 GPUs"),
    ("torchtitan: 8B on 8 GPUs, 32,768 to 262,144 tokens", "83.9 to 84.5 GiB", FLOAT8),
    ("torchtitan: 8B with float8 on 32 and 64 H200s", "47.96; 46.97 GiB", FLOAT8),
    ("torchtitan: 70B on 256 GPUs; with asynchronous tensor parallelism", "71.9; 67.6 GiB", "256 GPUs"),
    ("torchtitan: 405B on 512 GPUs", "72.7 to 84.9 GiB", "512 GPUs"),
]

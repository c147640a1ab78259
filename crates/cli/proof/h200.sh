#!/bin/bash
# `run.py` in two parts of at most 8 minutes each, on a machine with two GPUs, PyTorch, JAX and nvcc:
#
#     cargo build --release -p gpumem-cli && mkdir -p .gpu && xz -c target/release/gpumem > .gpu/gpumem.xz
#     OUT=results crates/cli/proof/h200.sh 1     # what is recorded is right, then pairs of runs for the times
#     OUT=results crates/cli/proof/h200.sh 2     # more pairs
#     python3 crates/cli/proof/run.py --join results/times-*.jsonl
#
# From the root of the repository. `.gpu/candle.xz` is the program with candle that `run.py` describes, and `.gpu/onnx.tar.xz` the package
# onnxruntime; without them these comparisons are left out. The pairs with the native allocator run on the first GPU, those with
# cudaMallocAsync on the second one at the same time, each on half of the processors.
set -u
part=$1 began=$(date +%s)
unpacked=$(mktemp -d)
for name in gpumem candle; do
  [ -f .gpu/$name.xz ] && xz -dkc .gpu/$name.xz > $unpacked/$name && chmod +x $unpacked/$name
done
export XDG_CACHE_HOME=$unpacked/cache
proof="python3 crates/cli/proof/run.py $unpacked/gpumem"
[ -f $unpacked/candle ] && candle="--candle $unpacked/candle" || candle=
[ -f .gpu/onnx.tar.xz ] && tar xf .gpu/onnx.tar.xz -C $unpacked && onnx="--onnx $unpacked" || onnx=
half=$(($(nproc) / 2))

if [ "$part" = 1 ]; then
  # These run at the same time, because they do not depend on each other. `oom` fills a GPU, so it runs after the others.
  CUDA_VISIBLE_DEVICES=0 timeout 150 $proof --only static,killed,cupti,handles,native,lines --out $OUT/right-1.jsonl > $OUT/right-1.log 2>&1 &
  CUDA_VISIBLE_DEVICES=1 timeout 150 $proof --only expandable,async,jax --out $OUT/right-2.jsonl > $OUT/right-2.log 2>&1 &
  CUDA_VISIBLE_DEVICES=0 timeout 150 $proof --only profiler,candle,onnx $candle $onnx --out $OUT/right-3.jsonl > $OUT/right-3.log 2>&1 &
  timeout 150 $proof --only ranks --out $OUT/right-4.jsonl > $OUT/right-4.log 2>&1 &
  wait
  CUDA_VISIBLE_DEVICES=1 timeout 60 $proof --only oom --out $OUT/right-5.jsonl > $OUT/right-5.log 2>&1
  cat $OUT/right-*.log | grep -E '^(PASS|FAIL|INFO)' | cut -c1-600
  cat $OUT/right-*.jsonl > $OUT/right.jsonl
  tail -c 4000 $OUT/right-*.log > $OUT/right.log
  rm $OUT/right-*
fi

seconds=$((440 - ($(date +%s) - began)))
CUDA_VISIBLE_DEVICES=0 taskset -c 0-$((half - 1)) $proof --only times --seconds $seconds --out $OUT/times-native-$part.jsonl > /dev/null 2> $OUT/native-$part.err &
CUDA_VISIBLE_DEVICES=1 taskset -c $half-$((2 * half - 1)) $proof --only times-async --seconds $seconds --out $OUT/times-async-$part.jsonl > /dev/null 2> $OUT/async-$part.err &
wait
python3 crates/cli/proof/run.py --join $OUT/times-*-$part.jsonl

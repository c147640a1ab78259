# Traces of the Python package in a program that allocates memory of the stand-in driver.
import asyncio

from gpumem_trace import GPUMemTrace, gpu_mem_get, gpu_mem_trace
from standin_cuda import alloc, call, cuda, enter, word


@gpu_mem_trace
def forward():
    cuda.cuMemFree_v2(word(alloc(50)[1]))
    return alloc(10)


@gpu_mem_trace
async def task(mib):
    kept = alloc(mib)[1]
    await asyncio.sleep(0)
    cuda.cuMemFree_v2(word(kept))


async def tasks():
    await asyncio.gather(task(7), task(9))


assert call("cuInit", 0) == 0
enter(0)
with GPUMemTrace(ctx="train") as trace:
    for _ in range(2):
        forward()
    asyncio.run(tasks())
print(trace.is_exact, trace.used >> 20, trace.peaked >> 20, gpu_mem_get().total > 0)

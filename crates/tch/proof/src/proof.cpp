// These functions are missing in tch: PyTorch's statistics, streams, and private pools.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <vector>

namespace allocator = c10::cuda::CUDACachingAllocator;

// Writes memory_allocated, max_memory_allocated and memory_reserved to `to`.
extern "C" void proof_stats(int32_t device, int64_t* to) {
    const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
    to[0] = stats.allocated_bytes[0].current;
    to[1] = stats.allocated_bytes[0].peak;
    to[2] = stats.reserved_bytes[0].current;
}

extern "C" void proof_reset_peak(int32_t device) {
    allocator::resetPeakStats(static_cast<c10::DeviceIndex>(device));
}

// Allocates memory as for a tensor.
extern "C" void* proof_alloc(size_t bytes, bool on_other_stream) {
    const auto before = c10::cuda::getCurrentCUDAStream();
    if (on_other_stream) c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromPool());
    auto* memory = new c10::DataPtr(allocator::get()->allocate(bytes));
    c10::cuda::setCurrentCUDAStream(before);
    return memory;
}

extern "C" void proof_free(void* memory) {
    delete static_cast<c10::DataPtr*>(memory);
}

// Makes another stream use the memory for some time.
extern "C" void proof_use_elsewhere(void* memory, size_t bytes) {
    const auto stream = c10::cuda::getStreamFromPool();
    const auto& data = *static_cast<c10::DataPtr*>(memory);
    auto* begin = static_cast<char*>(data.get());
    for (int at = 0; at < 50; ++at) allocator::memcpyAsync(begin + bytes / 2, 0, begin, 0, bytes / 2, stream.stream(), true);
    allocator::recordStream(data, stream);
}

// Makes all memory come from a private pool until `proof_end_pool`, as during the capture of a graph.
extern "C" void proof_begin_pool(int32_t device, uint64_t number) {
    allocator::beginAllocateToPool(static_cast<c10::DeviceIndex>(device), {0, number}, [](cudaStream_t) { return true; });
}

extern "C" void proof_end_pool(int32_t device, uint64_t number) {
    allocator::endAllocateToPool(static_cast<c10::DeviceIndex>(device), {0, number});
}

extern "C" void proof_release_pool(int32_t device, uint64_t number) {
    allocator::releasePool(static_cast<c10::DeviceIndex>(device), {0, number});
}

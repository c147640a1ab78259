// Passes the events of PyTorch's CUDA allocator to Rust. The numbers of actions and kinds must match those in `sys.rs`.
//
// The functions return null, or the text of an exception, which Rust frees.

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <cstdlib>
#include <cstring>

namespace at::cuda {
// A function of libtorch_cuda. The linker drops a library if none of its functions is used, and PyTorch has no CUDA without this one.
int warp_size();
} // namespace at::cuda

static int (*volatile needs_cuda)() = at::cuda::warp_size;

namespace allocator = c10::cuda::CUDACachingAllocator;
using Entry = allocator::TraceEntry;

template <typename Code>
static char* guarded(Code code) {
    try {
        code();
        return nullptr;
    } catch (const c10::Error& error) {
        return strdup(error.what_without_backtrace());
    } catch (const std::exception& error) {
        return strdup(error.what());
    } catch (...) {
        return strdup("an exception without a text");
    }
}

// Initialises CUDA, so that the allocator knows the devices. Without CUDA, the number of devices is 0.
extern "C" char* gpumem_tch_init(int32_t* devices, bool* is_native) {
    return guarded([&] {
        *devices = needs_cuda != nullptr ? c10::cuda::device_count() : 0;
        if (*devices > 0) {
            at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
            *is_native = allocator::name() == "native";
        }
    });
}

extern "C" char* gpumem_tch_attach(void (*event)(int32_t action, int32_t device, uint64_t address, uint64_t bytes)) {
    return guarded([&] {
        allocator::attachAllocatorTraceTracker([event](const Entry& entry) {
            int32_t action = 0;
            switch (entry.action_) {
                case Entry::ALLOC: action = 1; break;
                case Entry::FREE_REQUESTED: action = 2; break;
                case Entry::FREE_COMPLETED: action = 3; break;
                case Entry::SEGMENT_ALLOC: action = 4; break;
                case Entry::SEGMENT_FREE: action = 5; break;
                case Entry::SEGMENT_MAP: action = 6; break;
                case Entry::SEGMENT_UNMAP: action = 7; break;
                default: return;
            }
            event(action, entry.device_, entry.addr_, entry.size_);
        });
    });
}

// Reports the settings, the segments, and the blocks that are not free. Each segment comes before its blocks.
extern "C" char* gpumem_tch_snapshot(
    void* to, void (*line)(void* to, int32_t kind, int32_t device, uint64_t address, uint64_t bytes)) {
    return guarded([&] {
        const auto snapshot = allocator::snapshot();
        const auto& settings = snapshot.config_metadata;
        line(to, 1, 0, 0, settings.max_split_size);
        for (const auto divisions : settings.roundup_power2_divisions) line(to, 2, 0, 0, divisions);
        for (const auto& segment : snapshot.segments) {
            line(to, segment.is_expandable ? 4 : 3, segment.device, segment.address, segment.total_size);
            uint64_t address = segment.address;
            for (const auto& block : segment.blocks) {
                if (block.active) line(to, block.allocated ? 5 : 6, segment.device, address, block.size);
                address += block.size;
            }
        }
    });
}

extern "C" char* gpumem_tch_empty_cache() {
    return guarded([] { allocator::emptyCache(); });
}

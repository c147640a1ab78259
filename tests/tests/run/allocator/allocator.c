// Stands in for libc10_cuda.so: an allocator with the names and layouts of C++ that gpumem uses, which takes segments from the stand-in
// driver.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define OWN "_ZN3c104cuda20CUDACachingAllocator6Native22NativeCachingAllocator"
enum { ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE };
enum { CLONE = 2, DESTROY = 3 };

struct entry {
    int32_t action;
    int8_t device;
    uint64_t address;
    void *context[2], *stream;
    uint64_t bytes, more[8];
};

// std::function<void(const TraceEntry&)>
struct function {
    void *functor[2];
    _Bool (*manager)(void *to, const void *from, int32_t operation);
    void (*invoker)(const void *functor, const struct entry *entry);
};

struct allocator {
    const void *const *functions;
    struct function *trackers;
    int count;
};

// Like the real one: the caller's function is copied, the copy is moved to a list, and what is left of the copy is destroyed.
static __attribute__((used)) void attach(struct allocator *this, struct function *by_value) __asm__(
    OWN "27attachAllocatorTraceTrackerESt8functionIFvRKNS_22CachingDeviceAllocator10TraceEntryEEE");

static void attach(struct allocator *this, struct function *by_value) {
    struct function copy = {0};
    by_value->manager(&copy, by_value, CLONE);
    copy.manager = by_value->manager;
    copy.invoker = by_value->invoker;
    this->trackers = realloc(this->trackers, (this->count + 1) * sizeof copy);
    this->trackers[this->count++] = copy;
}

static const void *const table[] __asm__("_ZTVN3c104cuda20CUDACachingAllocator6Native22NativeCachingAllocatorE");
static const void *const table[] = {0, 0, attach};
static const void *const others[] = {0, 0, abort};
static struct allocator native = {table + 2}, other = {others + 2};
struct allocator *allocator __asm__("_ZN3c104cuda20CUDACachingAllocator9allocatorE") = &native;

static void report(int32_t action, uint64_t address, uint64_t bytes) {
    struct entry entry = {.action = action, .address = address, .bytes = bytes};
    memset(entry.more, 0x77, sizeof entry.more);
    for (int at = 0; at < native.count; at++) native.trackers[at].invoker(&native.trackers[at], &entry);
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes);
int cuMemFree_v2(uint64_t address);

uint64_t segment(uint64_t bytes) {
    uint64_t address = 0;
    if (cuMemAlloc_v2(&address, bytes)) return 0;
    report(SEGMENT_ALLOC, address, bytes);
    return address;
}

void release(uint64_t address, uint64_t bytes) {
    report(SEGMENT_FREE, address, bytes);
    cuMemFree_v2(address);
}

void tensor(uint64_t address, uint64_t bytes) { report(ALLOC, address, bytes); }

void drop(uint64_t address, uint64_t bytes) {
    report(FREE_REQUESTED, address, bytes);
    report(FREE_COMPLETED, address, bytes);
}

void replace(void) { allocator = &other; }

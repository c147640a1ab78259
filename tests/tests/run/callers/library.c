// A library that allocates through a function that it is given: the driver's, or another library's.
#include <stdint.h>
#include <stddef.h>

typedef int (*alloc_t)(uint64_t *, size_t, uint64_t);
static alloc_t next;
static volatile int calls;

// Libraries of different padding call from different addresses.
#ifdef PADDING
__asm__(".skip " PADDING ", 0x90");
#endif

void set(alloc_t alloc) { next = alloc; }

int take(uint64_t *address, size_t bytes, uint64_t stream) {
    int code = next(address, bytes, stream);
    // The call above is not a jump.
    calls++;
    return code;
}

/* Memory pools, measured by gpumem: https://docs.rs/gpumem/latest/gpumem/pool/
 *
 * A pool takes large blocks from the driver and gives out parts of them. It reports them with these four functions, from any thread.
 * A function that gets a null pool does nothing, so a program need not check whether it is measured.
 *
 * Link with libgpumem_c.so, which `cargo build --release -p gpumem-c` builds. A program in Rust depends on the crate gpumem-c and names
 * it once: `use gpumem_c as _;`. */
#ifndef GPUMEM_H
#define GPUMEM_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpumem_pool gpumem_pool;

/* Registers a pool on a CUDA device, before it takes its first block; a negative number is the current device of the thread. The name
 * is copied; the second pool of a name on a device is called `NAME #2`. It initialises CUDA, so a program that forks calls it after that. A pool lives as long as the process, which has at most 54;
 * one pool can stand for several allocators. Returns null, and says why on stderr, if there are 54 or the device cannot be measured. */
gpumem_pool *gpumem_pool_register(const char *name, int device);

/* The pool has given out a part. Call it on the thread that asked for the part. */
void gpumem_pool_allocated(gpumem_pool *pool, const void *address, size_t bytes);

/* A part is freed. Call it before the pool can give its address out again. */
void gpumem_pool_freed(gpumem_pool *pool, const void *address);

/* How much the pool has from the driver, in use or not. Call it right after the driver gave a block or got one back, on the same
 * thread, with the exact sum. A pool of several threads holds one lock around both calls, and for its other calls: if another thread
 * allocates, frees or reads figures in between, peaks may have the whole block, and the pool's row says so. With 0 all parts count as
 * freed. */
void gpumem_pool_set_reserved(gpumem_pool *pool, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif

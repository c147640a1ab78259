/* Memory pools, measured by gpumem: https://docs.rs/gpumem/latest/gpumem/pool/
 *
 * A pool allocates large blocks from the driver and hands out parts of them. It reports both with these four functions, from any
 * thread. With a null pool, the functions do nothing, so a program need not check whether its pool is measured.
 *
 * Link with libgpumem_c.so, which `cargo build --release -p gpumem-c` builds. A Rust program depends on the crate gpumem-c and names it
 * once: `use gpumem_c as _;`. */
#ifndef GPUMEM_H
#define GPUMEM_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpumem_pool gpumem_pool;

/* Registers a pool on a CUDA device. Call it before the pool allocates its first block. A negative number means the thread's current
 * device. The name is copied; the second pool with the same name on a device is called `NAME #2`. This function initialises CUDA, so a
 * program that forks must call it after the fork. A pool lives as long as the process. A process can register at most 54 pools; one pool
 * can stand for several allocators. If there are 54 already or the device cannot be measured, the function prints the reason to stderr
 * and returns null. */
gpumem_pool *gpumem_pool_register(const char *name, int device);

/* Records that the pool has handed out a part. Call it on the thread that requested the part. */
void gpumem_pool_allocated(gpumem_pool *pool, const void *address, size_t bytes);

/* Records that a part is freed. Call it before the pool can hand out the same address again. */
void gpumem_pool_freed(gpumem_pool *pool, const void *address);

/* Sets how many bytes the pool holds from the driver, whether or not they are in use. Call it with the exact sum right after the driver
 * has allocated or freed a block, on the same thread. A pool that several threads use must hold one lock around both calls, and around
 * its other calls of these functions. Otherwise another thread may allocate, free or read values between the two; peaks may then include
 * the whole block, and the pool's row in the report mentions it. With 0, all parts count as freed. */
void gpumem_pool_set_reserved(gpumem_pool *pool, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif

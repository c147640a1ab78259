// A pool that takes two blocks from the driver and gives out parts of them, on two threads.
#include <dlfcn.h>
#include <fcntl.h>
#include <gpumem.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

static gpumem_pool *pool;
static char *block;

static void *other_thread(void *unused) {
    (void)unused;
    gpumem_pool_allocated(pool, block + (40 << 20), 3 << 20);
    return 0;
}

// Nothing can be written to stderr any more: it is a full disk, or a pipe that nobody reads.
static void lose_stderr(int full) {
    int ends[2] = {-1, -1};
    if (full) ends[1] = open("/dev/full", O_WRONLY);
    else if (!pipe(ends)) close(ends[0]);
    dup2(ends[1], 2);
}

int main(int count, char **arguments) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    if (!driver) { fprintf(stderr, "%s\n", dlerror()); return 2; }
    int (*alloc)(char **, size_t) = (int (*)(char **, size_t))dlsym(driver, "cuMemAlloc_v2");
    ((int (*)(int))dlsym(driver, "cuInit"))(0);
    ((int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, 0);
    ((int (*)(void *))dlsym(driver, "cuCtxSetCurrent"))(context);
    pool = gpumem_pool_register("pool in C", 0);
    if (!pool) return 3;
    if (count > 1) lose_stderr(*arguments[1] == 'f');
    if (gpumem_pool_register("no device", 99)) return 4;
    char *workspace;
    if (alloc(&workspace, 8 << 20) || alloc(&block, 64 << 20)) return 5;
    gpumem_pool_allocated(pool, block, 10 << 20);
    gpumem_pool_allocated(pool, block + (10 << 20), 20 << 20);
    gpumem_pool_freed(pool, block);
    pthread_t thread;
    pthread_create(&thread, 0, other_thread, 0);
    pthread_join(thread, 0);
    char *second;
    if (alloc(&second, 32 << 20)) return 6;
    gpumem_pool_set_reserved(pool, 96 << 20);
    gpumem_pool_freed(pool, second);
    // Without a pool nothing happens.
    gpumem_pool_allocated(0, block, 1);
    gpumem_pool_freed(0, block);
    gpumem_pool_set_reserved(0, 1);
    return 0;
}

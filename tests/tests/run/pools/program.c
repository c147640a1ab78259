// A pool with a block of 64 MiB, of which 36 MiB are in use at most, and 8 MiB beside it. The argument says what goes wrong.
#include <dlfcn.h>
#include <fcntl.h>
#include <gpumem.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const size_t MIB = 1 << 20;
static void *driver;

static void check(const char *name, int code) {
    if (code) { fprintf(stderr, "%s: %d\n", name, code); exit(3); }
}

static uint64_t take(size_t mib) {
    uint64_t address = 0;
    check("cuMemAlloc", ((int (*)(uint64_t *, size_t))dlsym(driver, "cuMemAlloc_v2"))(&address, mib * MIB));
    return address;
}

static gpumem_pool *pool;
static char *block;
static void train(void) {
    gpumem_pool_allocated(pool, block, 4 * MIB);
    gpumem_pool_allocated(pool, block + 4 * MIB, 32 * MIB);
    gpumem_pool_freed(pool, block + 4 * MIB);
}

static void *train_beside(void *unused) {
    train();
    return unused;
}

// Nothing can be written to stderr any more: it is a full disk, or a pipe that nobody reads.
static void lose_stderr(int full) {
    int ends[2] = {-1, -1};
    if (full) ends[1] = open("/dev/full", O_WRONLY);
    else if (!pipe(ends)) close(ends[0]);
    dup2(ends[1], 2);
}

int main(int count, char **arguments) {
    const char *wrong = count > 1 ? arguments[1] : "nothing";
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) { fprintf(stderr, "%s\n", dlerror()); return 2; }
    check("cuInit", ((int (*)(unsigned))dlsym(driver, "cuInit"))(0));
    void *context;
    check("cuDevicePrimaryCtxRetain", ((int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, 0));
    check("cuCtxSetCurrent", ((int (*)(void *))dlsym(driver, "cuCtxSetCurrent"))(context));
    if (!strcmp(wrong, "late")) block = (char *)take(64);
    pool = gpumem_pool_register("arena", 0);
    printf("%s\n", pool ? "registered" : "not registered");
    if (!block) block = (char *)take(64);
    if (!strncmp(wrong, "no device", 9)) {
        if (wrong[9]) lose_stderr(!strcmp(wrong, "no device, full"));
        gpumem_pool *none = gpumem_pool_register("none", 99);
        if (none) return 4;
        gpumem_pool_allocated(none, block, 1);
        gpumem_pool_freed(none, block);
        gpumem_pool_set_reserved(none, 1);
    }
    if (!strcmp(wrong, "undecided")) abort();
    size_t mib = !strcmp(wrong, "too much") ? 1ull << 40 : !strcmp(wrong, "more") ? 32 << 10 : 64;
    gpumem_pool_set_reserved(pool, mib * MIB);
    if (!strcmp(wrong, "no part")) abort();
    take(8);
    if (!strcmp(wrong, "unused")) return 0;
    if (!strcmp(wrong, "beside")) {
        pthread_t thread;
        check("pthread_create", pthread_create(&thread, NULL, train_beside, NULL));
        return pthread_join(thread, NULL);
    }
    if (!strcmp(wrong, "others")) gpumem_pool_set_reserved(pool, 70 * MIB);
    train();
    if (!strcmp(wrong, "less")) gpumem_pool_set_reserved(pool, 2 * MIB);
    if (!strcmp(wrong, "unknown")) gpumem_pool_freed(pool, block + MIB);
    if (!strncmp(wrong, "overlap", 7)) gpumem_pool_allocated(pool, block + 2 * MIB, 40 * MIB);
    if (!strcmp(wrong, "overlapped")) gpumem_pool_freed(pool, block + 2 * MIB);
    if (!strcmp(wrong, "twins")) {
        gpumem_pool *twin = gpumem_pool_register("arena", 0);
        char *of_twin = (char *)take(16);
        gpumem_pool_set_reserved(twin, 16 * MIB);
        gpumem_pool_allocated(twin, of_twin, 6 * MIB);
    }
    if (!strcmp(wrong, "exit")) _exit(0);
    for (int more = 1; !strcmp(wrong, "many") && more < 55; more++) gpumem_pool_register("more", 0);
    return 0;
}

// A program of the CUDA runtime that uses all of its devices. It prints what it saw.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

int cudaGetDeviceCount(int *), cudaSetDevice(int), cudaGetDevice(int *), cudaInitDevice(int, unsigned, unsigned);
int cudaGetDeviceProperties(char *, int), cudaMalloc(void **, size_t), cudaMallocAsync(void **, size_t, void *), cudaFree(void *);
int cudaMemGetInfo(size_t *, size_t *), cudaStreamCreate(void **), cudaStreamGetDevice(void *, int *);
int cudaMemcpyPeer(void *, int, const void *, int, size_t), cudaPointerGetAttributes(int *, void *);
int cudaDeviceEnablePeerAccess(int, int), cudaDeviceCanAccessPeer(int *, int, int), cudaDeviceGetAttribute(int *, int, int);
int cudaDeviceGetPCIBusId(char *, int, int), cudaDeviceGetByPCIBusId(int *, const char *), cudaDeviceGetDefaultMemPool(void **, int);
int cudaMemPoolCreate(void **, const void *), cudaMallocFromPoolAsync(void **, size_t, void *, void *), cudaDeviceReset(void);

#define MIB ((size_t)1 << 20)
#define DRIVER(name, ...) ((int (*)())dlsym(dlopen("libcuda.so.1", RTLD_NOW), name))(__VA_ARGS__)

static int count;

static void free_of_each(const char *when) {
    int before;
    cudaGetDevice(&before);
    printf("%s:", when);
    for (int device = 0; device < count; device++) {
        size_t left = 0, all = 0;
        cudaSetDevice(device);
        int code = cudaMemGetInfo(&left, &all);
        printf(" %d %zu/%zu", code, left / MIB, all / MIB);
    }
    puts("");
    cudaSetDevice(before);
}

static int device_of(void *address) {
    int found[8] = {0, -1};
    return cudaPointerGetAttributes(found, address) ? -2 : found[1];
}

// A thread begins with the first device, whatever the others use.
static void *thread(void *card) {
    int device = -1, begun = -1;
    void *block = 0;
    if (card) cudaGetDevice(&begun), cudaSetDevice(*(int *)card);
    int code = cudaMalloc(&block, 300 * MIB);
    cudaGetDevice(&device);
    printf("thread: %d %d %d %d\n", begun, code, device, device_of(block));
    return 0;
}

static void run_thread(int *card) {
    pthread_t id;
    pthread_create(&id, 0, thread, card);
    pthread_join(id, 0);
}

int main(void) {
    int device = -1, code = cudaSetDevice(3);
    cudaGetDevice(&device);
    printf("first: %d %d\n", code, device);
    printf("count: %d", cudaGetDeviceCount(&count));
    printf(" %d, none: %d %d\n", count, cudaSetDevice(count), cudaSetDevice(-1));
    // A thread that names no card has the only one that is used.
    if (count > 1) run_thread(0);
    for (int at = 0; at < count; at++) {
        char properties[1024], bus[32] = "";
        int domain = -1, found = -1;
        size_t bytes;
        code = cudaGetDeviceProperties(properties, at);
        memcpy(&bytes, properties + 288, 8);
        cudaDeviceGetAttribute(&domain, 50, at), cudaDeviceGetPCIBusId(bus, 32, at), cudaDeviceGetByPCIBusId(&found, bus);
        printf("device %d: %d %zu %d %d %s %d uuid %d\n", at, code, bytes / MIB, domain, *(int *)(properties + 576), bus, found, properties[271] & 15);
    }
    if (count < 4) return 0;
    free_of_each("free");
    void *large = 0, *small = 0, *refused = 0, *first = 0;
    cudaSetDevice(3);
    printf("large: %d", cudaMalloc(&large, 20000 * MIB));
    printf(" small: %d", cudaMalloc(&small, MIB));
    printf(" refused: %d\n", cudaMalloc(&refused, 20000 * MIB));
    cudaSetDevice(0);
    printf("on the first: %d\n", cudaMalloc(&first, 20000 * MIB));
    free_of_each("after");
    printf("pointers: %d %d %d\n", device_of(large), device_of(small), device_of(first));
    // The driver shows the machine's devices, and accepts the program's devices.
    int shown = -1, ordinal = -1, here = -1, used[4], flags;
    cudaSetDevice(3);
    DRIVER("cuDeviceGetCount", &shown), DRIVER("cuPointerGetAttribute", &ordinal, 9, small), DRIVER("cuCtxGetDevice", &here);
    for (int at = 0; at < 4; at++) used[at] = -1, DRIVER("cuDevicePrimaryCtxGetState", at, &flags, &used[at]);
    printf("driver: %d %d %d, used %d %d %d %d\n", shown, ordinal, here, used[0], used[1], used[2], used[3]);
    cudaGetDevice(&here);
    int executed = DRIVER("standin_executed");
    cudaSetDevice(1);
    size_t parameter = (size_t)small;
    void *parameters[] = {&parameter};
    code = DRIVER("cuLaunchKernel", 1L, 1, 1, 1, 1, 1, 1, 0, 0L, parameters, 0L);
    printf("launch on another: %d %d\n", code, DRIVER("standin_executed") - executed);
    int can = -1, itself = -1;
    code = cudaDeviceCanAccessPeer(&can, 0, 3), cudaDeviceCanAccessPeer(&itself, 2, 2);
    printf("peers: %d %d %d, enabled %d", code, can, itself, cudaDeviceEnablePeerAccess(3, 0));
    printf(" %d", cudaDeviceEnablePeerAccess(3, 0));
    printf(" %d %d\n", cudaDeviceEnablePeerAccess(1, 0), cudaDeviceEnablePeerAccess(4, 0));
    void *target = 0;
    cudaMalloc(&target, MIB);
    executed = DRIVER("standin_executed");
    code = cudaMemcpyPeer(target, 1, small, 3, MIB);
    int copied = DRIVER("standin_executed") - executed;
    printf("copy: %d %d, large %d, none %d\n", code, copied > 0, cudaMemcpyPeer(target, 1, large, 3, MIB), cudaMemcpyPeer(target, 1, small, 4, MIB));
    void *stream = 0, *block = 0, *pool = 0, *made = 0;
    cudaSetDevice(2);
    cudaStreamCreate(&stream);
    cudaSetDevice(0);
    cudaStreamGetDevice(stream, &device);
    code = cudaMallocAsync(&block, 100 * MIB, stream);
    printf("stream: %d, allocates %d on %d\n", device, code, device_of(block));
    int properties[22] = {1, 0, 1, 1};
    code = cudaDeviceGetDefaultMemPool(&pool, 2);
    printf("pools: %d %d", code, cudaMemPoolCreate(&made, properties));
    cudaMallocFromPoolAsync(&block, 100 * MIB, pool, 0), printf(" on %d", device_of(block));
    cudaMallocFromPoolAsync(&block, 100 * MIB, made, 0), printf(" %d\n", device_of(block));
    int card = 1;
    run_thread(&card);
    cudaGetDevice(&here);
    printf("here: %d\n", here);
    cudaSetDevice(3);
    printf("reset: %d\n", cudaDeviceReset());
    free_of_each("at the end");
    return 0;
}

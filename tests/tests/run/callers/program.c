// Allocates blocks in libraries, of which one calls through a library that is named as NVIDIA's runtime, and one is unloaded.
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int (*alloc_t)(uint64_t *, size_t, uint64_t);
static void *driver;
static const char *folder;
static uint64_t stream;

static void *library(const char *name, alloc_t alloc) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    void *opened = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!opened) { fprintf(stderr, "%s\n", dlerror()); exit(2); }
    ((void (*)(alloc_t))dlsym(opened, "set"))(alloc);
    return opened;
}

static alloc_t of(void *opened) { return (alloc_t)dlsym(opened, "take"); }

// From this depth of the stack.
static int take(alloc_t alloc, size_t bytes, int depth) {
    if (depth > 0) {
        volatile char room[96];
        room[0] = (char)depth;
        return take(alloc, bytes, depth - 1) + room[0] - (char)depth;
    }
    uint64_t address = 0;
    int code = alloc(&address, bytes, stream);
    if (code) { fprintf(stderr, "cuMemAllocAsync: %d\n", code); exit(3); }
    return code;
}

static void *context;
static alloc_t two;
static void *other_thread(void *unused) {
    ((int (*)(void *))dlsym(driver, "cuCtxSetCurrent"))(context);
    for (int depth = 0; depth < 4; depth++) take(two, 32, depth);
    return unused;
}

int main(int count, char **words) {
    (void)count;
    folder = words[1];
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) { fprintf(stderr, "%s\n", dlerror()); return 2; }
    ((int (*)(int))dlsym(driver, "cuInit"))(0);
    ((int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, 0);
    ((int (*)(void *))dlsym(driver, "cuCtxSetCurrent"))(context);
    ((int (*)(uint64_t *, int))dlsym(driver, "cuStreamCreate"))(&stream, 1);
    alloc_t alloc = (alloc_t)dlsym(driver, "cuMemAllocAsync");
    void *one = library("libone.so", alloc);
    two = of(library("libtwo.so", of(library("libcudart.so.12", alloc))));
    for (int round = 0; round < 3; round++) {
        for (int depth = 0; depth < 40; depth++) {
            take(of(one), 1, depth);
            take(two, 1000, depth);
            take(alloc, 1000000, depth);
        }
    }
    take(two, 4 << 20, 5);
    pthread_t thread;
    pthread_create(&thread, 0, other_thread, 0);
    pthread_join(thread, 0);
    dlclose(one);
    void *three = library("libthree.so", alloc);
    take(of(three), 7, 3);
    take(of(three), 7, 4);
    puts("done");
    return 0;
}

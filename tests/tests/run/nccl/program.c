// Calls collectives, with buffers that a dry run has and with one that it does not have. Prints how many copies each makes.
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

int ncclCommInitAll(void **comms, int count, const int *devices);
int ncclCommCount(void *comm, int *count);
int ncclCommUserRank(void *comm, int *rank);
int ncclCommDestroy(void *comm);
int ncclAllReduce(const void *from, void *to, size_t count, int kind, int operation, void *comm, void *stream);
int ncclAllGather(const void *from, void *to, size_t count, int kind, void *comm, void *stream);
int ncclReduceScatter(const void *from, void *to, size_t count, int kind, int operation, void *comm, void *stream);
int ncclBroadcast(const void *from, void *to, size_t count, int kind, int root, void *comm, void *stream);
int ncclSend(const void *from, size_t count, int kind, int peer, void *comm, void *stream);

static void *driver;
#define CALL(name, ...) ((int (*)())dlsym(driver, name))(__VA_ARGS__)

static void *block(size_t bytes) {
    void *address = 0;
    if (CALL("cuMemAlloc_v2", &address, bytes)) puts("refused");
    return address;
}

// How many copies there were since the last line.
static void show(const char *name, int code) {
    static int before;
    int now = CALL("standin_executed");
    printf("%s %d: %d\n", name, code, now - before);
    before = now;
}

int main(int arguments, char **words) {
    void *context, *comm = &context;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    CALL("cuInit", 0);
    CALL("cuDevicePrimaryCtxRetain", &context, 0);
    CALL("cuCtxSetCurrent", context);
    if (arguments > 1) {
        void *comms[3] = {0}, *from = block(24), *to = block(24);
        int count = 0, rank = 0, code = ncclCommInitAll(comms, 3, 0);
        ncclCommCount(comms[2], &count), ncclCommUserRank(comms[2], &rank);
        printf("communicators %d: rank %d of %d, %s\n", code, rank, count, getenv("NCCL_HOSTID") ? "a machine of its own" : "this machine");
        if (!code) show("all gathers", ncclAllGather(from, to, 2, 2, comms[1], 0));
        printf("end: %d", ncclCommDestroy(comms[1]));
        printf(" %d\n", ncclCommDestroy(comms[1]));
        return 0;
    }
    // Of 3 ranks, this one has number 1. A value has 4 bytes.
    void *small = block(24), *other = block(24), *large = block(64 << 20);
    show("reduce large", ncclAllReduce(large, small, 6, 2, 0, comm, 0));
    show("send", ncclSend(large, 6, 2, 0, comm, 0));
    show("reduce", ncclAllReduce(small, other, 6, 2, 0, comm, 0));
    show("reduce in place", ncclAllReduce(small, small, 6, 2, 0, comm, 0));
    show("gather", ncclAllGather(small, other, 2, 2, comm, 0));
    show("scatter", ncclReduceScatter(small, other, 2, 2, 0, comm, 0));
    show("broadcast", ncclBroadcast(small, other, 6, 2, 1, comm, 0));
    show("broadcast of another", ncclBroadcast(small, other, 6, 2, 0, comm, 0));
    return 0;
}

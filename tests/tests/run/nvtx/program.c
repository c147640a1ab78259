// Marks ranges in every way that NVTX has, and allocates in them.
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <wchar.h>

typedef int (*alloc_t)(uint64_t *, size_t);
static alloc_t alloc;
static void *driver;

static void take(size_t mib) {
    uint64_t address = 0;
    int code = alloc(&address, mib << 20);
    if (code) { fprintf(stderr, "cuMemAlloc: %d\n", code); exit(3); }
}

static int call1(const char *name, uint64_t a) { return ((int (*)(uint64_t))dlsym(driver, name))(a); }

static void *context;
static nvtxDomainHandle_t domain;
static nvtxRangeId_t across;
static void *other_thread(void *unused) {
    (void)unused;
    call1("cuCtxSetCurrent", (uint64_t)context);
    nvtxDomainRangeEnd(domain, across);
    nvtxRangePushA("worker");
    take(16);
    return 0; // The range never ends.
}

static volatile int is_done;
static void *use(void *unused) {
    nvtxDomainHandle_t mine = nvtxDomainCreateA("of a thread");
    while (!is_done) nvtxDomainRangeEnd(mine, nvtxDomainRangeStartEx(mine, 0));
    return unused;
}

// Forks while other threads use NVTX. Returns the number of children that hang when they use it.
static int forks(int count) {
    pthread_t threads[4];
    int hung = 0;
    is_done = 0;
    nvtxRangePop(); // A child would wait for a thread that initializes NVTX.
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], 0, use, 0);
    for (int i = 0; i < count; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            is_done = 1;
            nvtxRangePushA("of a child");
            nvtxRangePop();
            nvtxRangeEnd(nvtxRangeStartA("of a child"));
            nvtxDomainRegisterStringA(nvtxDomainCreateA("domain of a child"), "string of a child");
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        hung += status != 0;
    }
    is_done = 1;
    for (int i = 0; i < 4; i++) pthread_join(threads[i], 0);
    return hung;
}

int main(int count, char **words) {
    int of_forks = count > 2 ? atoi(words[2]) : 0;
    int hung = of_forks ? forks(of_forks) : 0;
    // Many ranges, each with a name of its own, of which every second one never ends.
    for (int i = 0; i < (count > 1 ? atoi(words[1]) : 0); i++) {
        char name[32];
        snprintf(name, sizeof name, "range %d", i);
        nvtxRangePushA(name);
        if (i % 2) nvtxRangePop();
    }
    nvtxRangePushA("load");
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) { fprintf(stderr, "%s\n", dlerror()); return 2; }
    alloc = (alloc_t)dlsym(driver, "cuMemAlloc_v2");
    call1("cuInit", 0);
    ((int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain"))(&context, 0);
    call1("cuCtxSetCurrent", (uint64_t)context);
    take(1);
    nvtxRangePushW(L"layer \u00e9");
    take(2);
    nvtxRangePop();
    take(64);
    domain = nvtxDomainCreateA("libcudf");
    nvtxStringHandle_t name = nvtxDomainRegisterStringA(domain, "read");
    nvtxEventAttributes_t attributes = {0};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    attributes.message.registered = name;
    nvtxDomainRangePushEx(domain, &attributes);
    nvtxRangePushA("bad \xff name");
    nvtxDomainRangePop(domain); // It is not the innermost one.
    take(4);
    nvtxRangePop();
    nvtxRangePop(); // The end of `load`.
    for (int i = 0; i < 5; i++) nvtxRangePop(); // More than there are.
    nvtxDomainRangePushEx(domain, &attributes);
    take(128);
    nvtxRangePopPayload(domain, 0, 0); // NCCL ends ranges so.
    nvtxRangePushPayload(domain, 0, 0);
    take(256);
    nvtxRangePopPayload(domain, 0, 0);
    nvtxMarkPayload(0, 0, 0);
    nvtxRangeEndPayload(domain, nvtxRangeStartPayload(domain, 0, 0), 0, 0);
    nvtxRangeId_t id = nvtxRangeStartA("started");
    take(8);
    nvtxRangeEnd(id);
    nvtxMarkW(L"mark \u00e9");
    nvtxDomainMarkEx(domain, &attributes);
    across = nvtxDomainRangeStartEx(domain, &attributes);
    nvtxRangeEnd(815); // There is no such range.
    pthread_t thread;
    pthread_create(&thread, 0, other_thread, 0);
    pthread_join(thread, 0);
    nvtxRangePushA(0);
    take(32);
    hung += of_forks ? forks(of_forks) : 0;
    if (hung) fprintf(stderr, "%d children hung\n", hung);
    return hung ? 4 : 0;
}

// A copy of NVTX for a program that records itself. It is in a shared library, which takes the symbol of the program, as a copy that is linked
// into the program does: the program of the test is linked before the headers are there.
#define NVTX_STATIC_INJECTION_IMPL
extern int (*InitializeInjectionNvtx2_fnptr)(const void *(*)(unsigned));
struct nvtxExtModuleInfo_t;
extern int (*InitializeInjectionNvtxExtension_fnptr)(struct nvtxExtModuleInfo_t *);
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>

void push(const char *name) { nvtxRangePushA(name); }
void pop(const char *unused) { (void)unused; nvtxRangePop(); }
void pop_payload(const char *unused) { (void)unused; nvtxRangePopPayload(0, 0, 0); }
void mark(const char *name) { nvtxMarkA(name); }

// Another tool: it counts the ranges that it is told, and writes what it counted to the file that TOOL_FILE names. It uses NVTX itself while
// it is initialized.
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static int initialized, pushed, popped, registered, domains, started, ended, marked;

static int push_a(const char *name) { (void)name; return pushed++; }
static int push_w(const wchar_t *name) { (void)name; return pushed++; }
static int pop(void) { return popped++; }
static int domain_push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *attributes) {
    // The handles are its own ones.
    if (domain != (nvtxDomainHandle_t)1 || attributes->message.registered != (nvtxStringHandle_t)1) abort();
    return pushed++;
}
static int domain_pop(nvtxDomainHandle_t domain) { (void)domain; return popped++; }
static nvtxDomainHandle_t domain_create(const char *name) { (void)name; domains++; return (nvtxDomainHandle_t)1; }
static nvtxStringHandle_t register_string(nvtxDomainHandle_t domain, const char *text) {
    (void)domain; (void)text; registered++;
    return (nvtxStringHandle_t)1;
}
static nvtxRangeId_t start(const char *name) { (void)name; started++; return 4711; }
static void end(nvtxRangeId_t id) { if (id == 4711) ended++; }
static nvtxRangeId_t domain_start(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *attributes) {
    if (domain != (nvtxDomainHandle_t)1 || attributes->message.registered != (nvtxStringHandle_t)1) abort();
    started++;
    return 0; // It is an id as any other.
}
static void domain_end(nvtxDomainHandle_t domain, nvtxRangeId_t id) {
    if (domain == (nvtxDomainHandle_t)1 && id == 0) ended++;
}
static void mark_w(const wchar_t *name) { (void)name; marked++; }

static void *use(void *unused) {
    nvtxRangePushA("of the tool");
    nvtxRangePop();
    return unused;
}

int InitializeInjection(void) { initialized++; return 1; }

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
    const NvtxExportTableCallbacks *callbacks = get(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned size;
    if (!get(NVTX_ETID_VERSIONINFO) || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CUDA, &table, &size)) return 0;
    if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) || size < 16) return 0;
    *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push_a;
    *table[NVTX_CBID_CORE_RangePushW] = (NvtxFunctionPointer)push_w;
    *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
    *table[NVTX_CBID_CORE_RangeStartA] = (NvtxFunctionPointer)start;
    *table[NVTX_CBID_CORE_RangeEnd] = (NvtxFunctionPointer)end;
    *table[NVTX_CBID_CORE_MarkW] = (NvtxFunctionPointer)mark_w;
    if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)domain_push;
    *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)domain_pop;
    *table[NVTX_CBID_CORE2_DomainRangeStartEx] = (NvtxFunctionPointer)domain_start;
    *table[NVTX_CBID_CORE2_DomainRangeEnd] = (NvtxFunctionPointer)domain_end;
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)domain_create;
    *table[NVTX_CBID_CORE2_DomainRegisterStringA] = (NvtxFunctionPointer)register_string;
    // This comes back for the tool's own copy of NVTX.
    static int uses;
    if (uses++) return 1;
    pthread_t thread;
    pthread_create(&thread, 0, use, 0);
    pthread_join(thread, 0);
    use(0);
    return 1;
}

static int pop_payload(nvtxDomainHandle_t domain, const nvtxPayloadData_t *data, size_t count) {
    if (domain != (nvtxDomainHandle_t)1 || data || count) abort();
    return popped++;
}

int InitializeInjectionNvtxExtension(nvtxExtModuleInfo_t *module) {
    if (module->moduleId == NVTX_EXT_PAYLOAD_MODULEID)
        module->segments->functionSlots[NVTX3EXT_CBID_nvtxRangePopPayload] = (intptr_t)pop_payload;
    return 1;
}

__attribute__((destructor)) static void report(void) {
    FILE *file = getenv("TOOL_FILE") ? fopen(getenv("TOOL_FILE"), "w") : 0;
    if (!file) return;
    fprintf(file, "%d %d %d %d %d %d %d %d\n", initialized, pushed, popped, registered, domains, started, ended, marked);
    fclose(file);
}

// The functions of the CUDA driver that PyTorch, Triton and Transformer Engine call, and how they are
// found by name.
#include "stub.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int unknown(void) { COUNT(UNKNOWN_CALLS, 1); return OK; }

// Returns the latest version of a function, or one that only reports success if we have none.
static void *entry(const char *name) {
    static const char *const versions[] = {"%s_v3", "%s_v2", "%s"};
    char versioned[160];
    for (int i = 0; i < 3; i++) {
        snprintf(versioned, sizeof versioned, versions[i], name);
        void *function = dlsym(RTLD_DEFAULT, versioned);
        if (function) return function;
    }
    if (getenv("SIMULATED_GPU_TRACE")) fprintf(stderr, "simulated GPU: no body for %s\n", name);
    return unknown;
}
int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, u64 flags, int *found) {
    *f = entry(name);
    if (found) *found = 0;
    return OK;
}
int cudaGetDriverEntryPoint(const char *name, void **f, u64 flags, int *found) {
    return cudaGetDriverEntryPointByVersion(name, f, 0, flags, found);
}
int cuGetProcAddress_v2(const char *name, void **f, int version, u64 flags, int *found) {
    return cudaGetDriverEntryPointByVersion(name, f, 0, flags, found);
}
int cuGetProcAddress(const char *name, void **f, int version, u64 flags) { *f = entry(name); return OK; }

static u64 context[2];
int cuDriverGetVersion(int *v) { *v = CUDA_VERSION; return OK; }
int cuDeviceGet(int *device, int i) { *device = i; return OK; }
int cuDeviceGetCount(int *n) { *n = 1; return OK; }
int cuDeviceGetName(char *text, int n, int device) { snprintf(text, n, "Simulated GPU"); return OK; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = simulated_attribute(which); return OK; }
int cuDeviceTotalMem_v2(size_t *n, int device) { *n = simulated_capacity; return OK; }
int cuDevicePrimaryCtxRetain(void **c, int device) { *c = context; return OK; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return OK; }
int cuCtxGetCurrent(void **c) { *c = context; return OK; }
int cuCtxPopCurrent_v2(void **c) { *c = context; return OK; }
int cuCtxGetDevice(int *device) { *device = 0; return OK; }
int cuStreamGetCtx(void *stream, void **c) { *c = context; return OK; }
int cuGetErrorString(int e, const char **text) { *text = e ? "error of the simulated GPU" : "no error"; return OK; }
// torch 2.15 asks for what the driver logs when it starts. Nothing is logged.
int cuLogsRegisterCallback(void *callback, void *data, void **handle) {
    if (handle) *handle = 0;
    return OK;
}
SUCCEEDS(cuLogsUnregisterCallback)
int cuGetErrorName(int e, const char **text) { *text = e ? "CUDA_ERROR" : "CUDA_SUCCESS"; return OK; }

// Modules and kernels compiled at run time.
HANDS_OUT(cuModuleLoadData) HANDS_OUT(cuModuleLoadDataEx) HANDS_OUT(cuModuleLoad)
HANDS_OUT(cuModuleGetFunction) HANDS_OUT(cuLibraryLoadData) HANDS_OUT(cuLibraryGetKernel)
HANDS_OUT(cudaLibraryLoadData) HANDS_OUT(cudaLibraryGetKernel)
int cuLibraryGetModule(void **module, void *library) { *module = library; return OK; }
int cuKernelGetFunction(void **f, void *kernel) { *f = kernel; return OK; }
static int of_function(int which) { return which == 0 ? 1024 : which == 4 ? 32 : 0; }  // threads, registers
int cuFuncGetAttribute(int *v, int which, void *f) { *v = of_function(which); return OK; }
int cuKernelGetAttribute(int *v, int which, void *f, int device) { *v = of_function(which); return OK; }
int cuLaunchKernel() { return simulated_launch(0); }
int cuLaunchKernelEx() { return simulated_launch(0); }
int cuLaunchCooperativeKernel() { return simulated_launch(0); }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t m) { *n = 2; return OK; }
int cuOccupancyMaxActiveClusters(int *n, void *f, void *c) { *n = 66; return OK; }

int cuPointerGetAttribute(void *value, int which, u64 p) {
    enum { MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, IS_MANAGED = 8, DEVICE_ORDINAL = 9 };
    if (which == MEMORY_TYPE) *(int *)value = simulated_on_device((void *)p) ? 2 : 1;
    else if (which == DEVICE_ORDINAL || which == IS_MANAGED) *(int *)value = 0;
    else *(u64 *)value = which == DEVICE_POINTER || which == HOST_POINTER ? p : 0;
    return OK;
}
int cuMemGetInfo_v2(size_t *available, size_t *total) { return cudaMemGetInfo(available, total); }
int cuMemAlloc_v2(void **p, size_t n) { return cudaMalloc(p, n); }
int cuMemFree_v2(void *p) { return cudaFree(p); }
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t n, void *stream) { return simulated_copy(to, from, n, 0); }
int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t n, void *stream) { return simulated_copy(to, from, n, 0); }
int cuMemsetD8Async(void *p, unsigned char value, size_t n, void *stream) { return cudaMemset(p, value, n); }
int cuMemsetD32Async(void *p, unsigned value, size_t n, void *stream) { COUNT(MEMSETS, 1); return OK; }
int cuStreamSynchronize(void *stream) { simulated_host_sync(SYNC_STREAM, 0); return OK; }
int cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }

// Expandable segments, which reserve addresses and physical memory separately.
int cuMemGetAllocationGranularity(size_t *bytes, const void *property, int option) { *bytes = 2 << 20; return OK; }
int cuMemAddressReserve(void **p, size_t n, size_t alignment, void *at, u64 flags) {
    return (*p = simulated_reserve(n)) ? OK : NO_MEMORY;
}
int cuMemAddressFree(void *p, size_t n) { simulated_forget(p, n); return OK; }
int cuMemUnmap(void *p, size_t n) { simulated_forget(p, n); return OK; }
int cuMemCreate(u64 **handle, size_t n, const void *property, u64 flags) {
    COUNT(MALLOCS, 1);
    if (!simulated_take(n)) return NO_MEMORY;
    *handle = simulated_token();
    **handle = n;
    return OK;
}
int cuMemRelease(u64 *handle) {
    COUNT(FREES, 1);
    simulated_give_back(*handle);
    free(handle);
    return OK;
}
SUCCEEDS(cuInit) SUCCEEDS(cuCtxSetCurrent) SUCCEEDS(cuCtxPushCurrent_v2) SUCCEEDS(cuCtxGetLimit)
SUCCEEDS(cuCtxSetLimit) SUCCEEDS(cuDevicePrimaryCtxRelease_v2) SUCCEEDS(cuDevicePrimaryCtxSetFlags_v2)
SUCCEEDS(cuMemMap) SUCCEEDS(cuMemSetAccess) SUCCEEDS(cuPointerSetAttribute)
SUCCEEDS(cuModuleUnload) SUCCEEDS(cuLibraryUnload) SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuKernelSetAttribute) SUCCEEDS(cuFuncSetCacheConfig) SUCCEEDS(cuTensorMapEncodeTiled)
SUCCEEDS(cuTensorMapEncodeIm2col) SUCCEEDS(cuEventRecord) SUCCEEDS(cuStreamWaitEvent)
SUCCEEDS(cuLinkCreate_v2) SUCCEEDS(cuLinkAddData_v2) SUCCEEDS(cuLinkComplete)
SUCCEEDS(cuMulticastCreate) SUCCEEDS(cuMulticastAddDevice) SUCCEEDS(cuMulticastBindMem)
SUCCEEDS(cuMulticastUnbind)

// Replaces dlsym, so that a lookup of a CUDA function in NVIDIA's libraries finds ours.
typedef void *Lookup(void *, const char *);

static Lookup *real_dlsym(void) {
    static Lookup *real;
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    for (int i = 0; !real && i < 3; i++) real = (Lookup *)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    return real;
}

void *dlsym(void *library, const char *name) {
    static void *own;
    Lookup *real = real_dlsym();
    if (library != RTLD_NEXT && !strncmp(name, "cu", 2)) {
        if (!own) own = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
        void *function = real(own, name);
        Dl_info from;
        if (function && dladdr(function, &from) && from.dli_fbase == simulated_base) return function;
    }
    return real(library, name);
}

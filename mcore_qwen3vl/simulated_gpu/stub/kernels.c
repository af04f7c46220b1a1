// Kernels are registered by name. A launch is counted and has no effect.
#include "stub.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static Slot *kernels;  // keys: the host function of each kernel; values: its name, const char *
static int registered;
static void (*on_launch)(const char *name);

void simulated_on_launch(void (*function)(const char *)) { on_launch = function; }

int simulated_launch(const void *function) {
    COUNT(LAUNCHES, 1);
    simulated_enqueued();
    if (!on_launch) return OK;
    Slot *slot = kernels ? simulated_slot(kernels, function) : 0;
    on_launch(slot && slot->key ? (const char *)slot->value : "");
    return OK;
}

void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar() {}
void __cudaRegisterManagedVar() {}
void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name) {
    if (!kernels) kernels = simulated_pages(SLOTS * sizeof(Slot));
    if (registered++ > SLOTS / 2) return;  // the table is full: further kernels are counted without a name
    *simulated_slot(kernels, function) = (Slot){(void *)function, (u64)name};
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *stream = configuration.stream;
    return OK;
}
int __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return OK; }
int __cudaLaunchKernel(void *f, dim3 g, dim3 b, void **a, size_t m, void *s) { return simulated_launch(f); }
int cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, void *s) { return simulated_launch(f); }
int cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, void *s) {
    return simulated_launch(f);
}
int cudaLaunchKernelExC(const void *config, const void *f, void **a) { return simulated_launch(f); }
int cudaLaunchHostFunc(void *s, void (*f)(void *), void *data) { f(data); return OK; }
int cudaStreamAddCallback(void *s, void (*f)(void *, int, void *), void *data, unsigned flags) {
    f(s, 0, data);
    return OK;
}

enum { SHARED_MEMORY = 232448, RESIDENT_CLUSTERS = 66 };
struct function { size_t shared, constant, local; int threads, registers, ptx, binary, cache, dynamic; };
int cudaFuncGetAttributes(struct function *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->threads = 1024;
    a->registers = 32;
    a->ptx = a->binary = simulated_capability;
    a->dynamic = SHARED_MEMORY;
    return OK;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t m) { *n = 2; return OK; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m, unsigned g) {
    *n = 2;
    return OK;
}
int cudaOccupancyMaxActiveClusters(int *n, const void *f, const void *c) { *n = RESIDENT_CLUSTERS; return OK; }
int cudaOccupancyAvailableDynamicSMemPerBlock(size_t *n, const void *f, int a, int b) {
    *n = SHARED_MEMORY;
    return OK;
}
SUCCEEDS(cudaFuncSetAttribute)
SUCCEEDS(cudaFuncSetCacheConfig)
SUCCEEDS(cudaKernelSetAttributeForDevice)

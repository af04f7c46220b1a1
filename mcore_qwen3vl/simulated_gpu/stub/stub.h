// A simulated GPU for PyTorch. Memory is reserved and counted, and kernels do nothing.
//
// The files here make two shared libraries, built by ../device.py: libcuda.so.1 (the CUDA driver,
// runtime, cuBLAS, cuDNN and NVRTC) and libnvidia-ml.so.1 (NVML). They are preloaded, so PyTorch
// calls them instead of NVIDIA's. All declarations are our own; no CUDA header is needed.
//
// Environment, read once when the library is loaded:
//   SIMULATED_GPU_GIB          device memory in GiB (80)
//   SIMULATED_GPU_CONTEXT_MIB  device memory of the context and loaded kernels, in MiB (600)
//   SIMULATED_GPU_COPY_MIB     largest copy that is performed; larger ones are only counted (64)
//   SIMULATED_GPU_CAPABILITY   compute capability, 10 * major + minor (90)
//   SIMULATED_GPU_LATE=1       events complete only at a host sync, which gives an upper bound of
//                              the memory that several streams use
//   SIMULATED_GPU_TRACE=1      print the driver functions that were looked up and do not exist
#pragma once
#define _GNU_SOURCE
#include <stdint.h>
#include <stddef.h>

typedef unsigned long long u64;
typedef struct { unsigned x, y, z; } dim3;

// Error codes, the same in CUDA's runtime and driver.
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 101, NOT_READY = 600 };
#define CUDA_VERSION 13000

// Counters. ../device.py has the same order.
enum {
    LAUNCHES, GEMMS, CONVOLUTIONS, MEMSETS, H2D, D2H, D2D, H2D_BYTES, D2H_BYTES, D2D_BYTES,
    MALLOCS, FREES, USED, PEAK_USED, PINNED, PEAK_PINNED, HOST_SYNCS, UNKNOWN_CALLS, COUNTERS
};
extern u64 simulated_count[COUNTERS];
#define COUNT(counter, n) __atomic_add_fetch(&simulated_count[counter], (n), __ATOMIC_RELAXED)

// Kinds of host syncs. ../device.py has the same order.
enum { SYNC_DEVICE, SYNC_STREAM, SYNC_EVENT, SYNC_COPY, SYNC_TO_PAGEABLE, SYNC_FROM_PAGEABLE, SYNC_FREE };
void simulated_host_sync(int kind, u64 bytes);
void simulated_enqueued(void);  // work was enqueued, so the next stream sync counts by itself
u64 simulated_event_record(void);
int simulated_event_pending(u64 recorded);
void simulated_events_complete_late(int yes);

extern u64 simulated_capacity;  // bytes
extern int simulated_capability;
extern void *simulated_base;  // address at which this library is loaded
double simulated_setting(const char *name, double otherwise);
void *simulated_pages(u64 bytes);  // zeros, which take no memory until written to
void *simulated_token(void);       // a handle

// A hash table with addresses as keys and open addressing. Its memory is reserved once.
typedef struct { void *key; u64 value; } Slot;
enum { SLOTS = 1 << 20 };
Slot *simulated_slot(Slot *table, const void *key);

int simulated_on_device(const void *p);
void *simulated_reserve(u64 bytes);     // returns device addresses; 0: none are left
int simulated_take(u64 bytes);          // takes device memory; 0: there is not enough
void simulated_give_back(u64 bytes);
void simulated_forget(void *p, u64 bytes);  // discards the contents
int simulated_fail(int error);
int simulated_take_error(int clear);
int simulated_copy(void *to, const void *from, u64 bytes, int blocking);
int simulated_launch(const void *function);
int simulated_attribute(int which);

int cudaMalloc(void **p, size_t bytes);
int cudaFree(void *p);
int cudaMemGetInfo(size_t *available, size_t *total);
int cudaMemset(void *p, int value, size_t bytes);
int cudaDeviceSynchronize(void);

// Defines a function that only reports success.
#define SUCCEEDS(name) int name() { return OK; }
// Defines a function that only returns a handle.
#define HANDS_OUT(name) int name(void **handle) { *handle = simulated_token(); return OK; }

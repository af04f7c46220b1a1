// One device with an H100's properties, its streams and its events.
#include "stub.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int simulated_capability;

int simulated_attribute(int which) {
    switch (which) {
    case 1: case 2: case 3: return 1024;               // threads per block: total, x, y
    case 4: return 64;                                 // threads per block: z
    case 5: return 2147483647;                         // blocks per grid: x
    case 6: case 7: return 65535;                      // blocks per grid: y, z
    case 8: return 49152;                              // shared memory per block, bytes
    case 97: return 232448;                            //   at most, by opt-in
    case 81: return 233472;                            //   per multiprocessor
    case 111: return 1024;                             //   reserved per block
    case 10: return 32;                                // threads per warp
    case 12: case 82: return 65536;                    // registers per block, per multiprocessor
    case 13: case 36: return 1980000;                  // clock rates of device and memory, kHz
    case 16: return 132;                               // multiprocessors
    case 37: return 5120;                              // width of the memory bus, bits
    case 38: return 50 << 20;                          // L2 cache, bytes
    case 39: return 2048;                              // threads per multiprocessor
    case 75: return simulated_capability / 10;
    case 76: return simulated_capability % 10;
    case 106: return 32;                               // blocks per multiprocessor
    case 31: case 41: case 78: case 83: case 90: case 92: case 95: case 102: case 115: case 120:
        return 1;                                      // capabilities, such as concurrent kernels
    default: return 0;
    }
}
int cudaDeviceGetAttribute(int *value, int which, int device) {
    *value = simulated_attribute(which);
    return OK;
}

// Fields of cudaDeviceProp by byte offset, because CUDA 12 and 13 lay the struct out differently.
static void put(char *p, int offset, int v) { memcpy(p + offset, &v, 4); }
static void put_wide(char *p, int offset, u64 v) { memcpy(p + offset, &v, 8); }
static void properties(char *p, int toolkit) {
    memset(p, 0, toolkit == 12 ? 1032 : 1008);
    strcpy(p, "Simulated GPU");
    memset(p + 256, 7, 16);  // UUID
    put_wide(p, 288, simulated_capacity);
    put_wide(p, 296, 49152);
    put(p, 304, 65536);
    put(p, 308, 32);
    put_wide(p, 312, 2147483647);
    put(p, 320, 1024);
    for (int i = 0; i < 3; i++) put(p, 324 + 4 * i, i < 2 ? 1024 : 64);
    for (int i = 0; i < 3; i++) put(p, 336 + 4 * i, i < 1 ? 2147483647 : 65535);
    int major = simulated_capability / 10, minor = simulated_capability % 10;
    // Multiprocessors; threads, shared memory and registers per multiprocessor; shared memory per
    // block, by opt-in; blocks per multiprocessor; reserved shared memory per block.
    int v12[] = {388, 628, 648, 656, 704, 720, 728}, v13[] = {384, 604, 624, 632, 672, 688, 696};
    int *at = toolkit == 12 ? v12 : v13;
    put_wide(p, 352, 65536);
    put(p, 360, major);
    put(p, 364, minor);
    put_wide(p, 368, 512);
    put(p, at[0], 132);
    put(p, at[1], 2048);
    put_wide(p, at[2], 233472);
    put(p, at[3], 65536);
    put_wide(p, at[4], 232448);
    put(p, at[5], 32);
    put_wide(p, at[6], 1024);
    // Capabilities.
    int flags12[] = {384, 400, 576, 660, 692}, flags13[] = {392, 560, 588, 636, 668};
    for (int i = 0; i < 5; i++) put(p, toolkit == 12 ? flags12[i] : flags13[i], 1);
    put(p, toolkit == 12 ? 604 : 584, 3);  // copy engines
    put(p, toolkit == 12 ? 616 : 592, 5120);  // memory bus
    put(p, toolkit == 12 ? 620 : 596, 50 << 20);  // L2
}
int cudaGetDeviceProperties(void *p, int device) { properties(p, 13); return OK; }
int cudaGetDeviceProperties_v2(void *p, int device) { properties(p, 12); return OK; }

int cudaGetDeviceCount(int *n) { *n = 1; return OK; }
int cudaGetDevice(int *device) { *device = 0; return OK; }
int cudaSetDevice(int device) { return device == 0 ? OK : simulated_fail(NO_DEVICE); }
int cudaGetLastError(void) { return simulated_take_error(1); }
int cudaPeekAtLastError(void) { return simulated_take_error(0); }
int cudaDriverGetVersion(int *v) { *v = CUDA_VERSION; return OK; }
int cudaRuntimeGetVersion(int *v) { *v = CUDA_VERSION; return OK; }
int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return OK; }
int cudaDeviceGetPCIBusId(char *text, int n, int device) { snprintf(text, n, "0000:00:00.0"); return OK; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return OK; }
int cudaDeviceGetLimit(size_t *value, int limit) { *value = 0; return OK; }
const char *cudaGetErrorString(int e) {
    return e == NO_MEMORY ? "out of memory" : e ? "error of the simulated GPU" : "no error";
}
const char *cudaGetErrorName(int e) {
    return e == NO_MEMORY ? "cudaErrorMemoryAllocation" : e ? "cudaErrorUnknown" : "cudaSuccess";
}

// All work completes at once. Events complete at once too, or with SIMULATED_GPU_LATE at the next host
// sync.
int cudaDeviceSynchronize(void) { simulated_enqueued(); simulated_host_sync(SYNC_DEVICE, 0); return OK; }
int cudaStreamSynchronize(void *stream) { simulated_host_sync(SYNC_STREAM, 0); return OK; }
int cudaEventSynchronize(u64 *event) { simulated_enqueued(); simulated_host_sync(SYNC_EVENT, 0); return OK; }
int cudaEventRecord(u64 *event, void *stream) { *event = simulated_event_record(); return OK; }
int cudaEventRecordWithFlags(u64 *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
int cudaEventQuery(u64 *event) { return simulated_event_pending(*event) ? NOT_READY : OK; }
int cudaEventElapsedTime(float *ms, void *from, void *to) { *ms = 1; return OK; }
int cudaEventDestroy(void *event) { free(event); return OK; }
HANDS_OUT(cudaEventCreate)
HANDS_OUT(cudaEventCreateWithFlags)
HANDS_OUT(cudaStreamCreate)
HANDS_OUT(cudaStreamCreateWithFlags)
HANDS_OUT(cudaStreamCreateWithPriority)
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return OK; }
int cudaStreamGetDevice(void *stream, int *device) { *device = 0; return OK; }
int cudaStreamGetFlags(void *stream, unsigned *flags) { *flags = 1; return OK; }
int cudaStreamGetId(void *stream, u64 *id) { *id = (u64)stream; return OK; }
int cudaStreamIsCapturing(void *stream, int *capturing) { *capturing = 0; return OK; }
int cudaStreamGetCaptureInfo(void *stream, int *capturing) { *capturing = 0; return OK; }
int cudaStreamGetCaptureInfo_v2(void *stream, int *capturing) { *capturing = 0; return OK; }
int cudaStreamGetCaptureInfo_v3(void *stream, int *capturing) { *capturing = 0; return OK; }
static u64 pool[2];
int cudaDeviceGetDefaultMemPool(void **p, int device) { *p = pool; return OK; }
int cudaDeviceGetMemPool(void **p, int device) { *p = pool; return OK; }
int cudaMemPoolGetAttribute(void *p, int which, u64 *value) { *value = 0; return OK; }
SUCCEEDS(cudaStreamQuery) SUCCEEDS(cudaStreamWaitEvent) SUCCEEDS(cudaStreamDestroy)
SUCCEEDS(cudaStreamSetAttribute) SUCCEEDS(cudaThreadExchangeStreamCaptureMode)
SUCCEEDS(cudaInitDevice) SUCCEEDS(cudaDeviceReset) SUCCEEDS(cudaSetDeviceFlags)
SUCCEEDS(cudaDeviceSetLimit) SUCCEEDS(cudaDeviceEnablePeerAccess)
SUCCEEDS(cudaCtxResetPersistingL2Cache) SUCCEEDS(cudaProfilerStart) SUCCEEDS(cudaProfilerStop)
SUCCEEDS(cudaDeviceSetMemPool) SUCCEEDS(cudaMemPoolSetAttribute) SUCCEEDS(cudaMemPoolSetAccess)
SUCCEEDS(cudaMemPoolTrimTo)

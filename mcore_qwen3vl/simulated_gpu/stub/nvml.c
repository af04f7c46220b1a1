// NVML, the second library, describes the same device.
#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };
#define ANSWERS(name, result) int name() { return result; }
ANSWERS(nvmlInit, SUCCESS) ANSWERS(nvmlInit_v2, SUCCESS) ANSWERS(nvmlInitWithFlags, SUCCESS)
ANSWERS(nvmlShutdown, SUCCESS) ANSWERS(nvmlDeviceGetGpuFabricInfoV, SUCCESS)
ANSWERS(nvmlDeviceGetNvLinkRemoteDeviceType, NOT_SUPPORTED)
ANSWERS(nvmlDeviceGetNvLinkRemotePciInfo_v2, NOT_SUPPORTED)
ANSWERS(nvmlDeviceGetNvLinkState, NOT_SUPPORTED)

static char device[64];
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) {
    *handle = device;
    return i ? INVALID_ARGUMENT : SUCCESS;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) { *handle = device; return SUCCESS; }
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *n, void *list) { *n = 0; return SUCCESS; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *n, void *list) { *n = 0; return SUCCESS; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned n) {
    snprintf(text, n, "GPU-07070707-0707-0707-0707-070707070707");
    return SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    const char *set = getenv("SIMULATED_GPU_CAPABILITY");
    int capability = set ? atoi(set) : 90;
    *major = capability / 10, *minor = capability % 10;
    return SUCCESS;
}
const char *nvmlErrorString(int e) { return e ? "not supported by the simulated GPU" : "success"; }

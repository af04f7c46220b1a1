// cuBLAS, cuDNN and NVRTC. Each matmul and each graph is one launch without effect.
#include "stub.h"
#include <stdlib.h>
#include <string.h>

static int gemm(void) {
    COUNT(GEMMS, 1);
    COUNT(LAUNCHES, 1);
    simulated_enqueued();
    return OK;
}
static const char *status(int e) { return e ? "error of the simulated GPU" : "success"; }

// ---- cuBLAS and cuBLASLt ----
enum { CUBLAS_VERSION = 130101, DESCRIPTOR = 512 };
HANDS_OUT(cublasCreate_v2)
HANDS_OUT(cublasLtCreate)
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return OK; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return OK; }
int cublasGetVersion_v2(void *handle, int *v) { *v = CUBLAS_VERSION; return OK; }
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
size_t cublasLtGetCudartVersion(void) { return CUDA_VERSION; }
int cublasGetProperty(int which, int *v) { *v = which == 0 ? 13 : 1; return OK; }
int cublasLtGetProperty(int which, int *v) { return cublasGetProperty(which, v); }
const char *cublasGetStatusString(int e) { return status(e); }
const char *cublasLtGetStatusString(int e) { return status(e); }
static int descriptor(void **d) { *d = calloc(1, DESCRIPTOR); return OK; }
int cublasLtMatmulDescCreate(void **d, int compute, int scale) { return descriptor(d); }
int cublasLtMatrixLayoutCreate(void **d, int type, u64 rows, u64 columns, long long lead) { return descriptor(d); }
int cublasLtMatmulPreferenceCreate(void **d) { return descriptor(d); }
int cublasLtMatmulDescDestroy(void *d) { free(d); return OK; }
int cublasLtMatrixLayoutDestroy(void *d) { free(d); return OK; }
int cublasLtMatmulPreferenceDestroy(void *d) { free(d); return OK; }
struct heuristic { u64 algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; };
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, struct heuristic *result, int *found) {
    memset(result, 0, sizeof *result);
    result->waves = 1;
    *found = wanted > 0;
    return OK;
}
int cublasLtMatmulAlgoCheck(void *handle, void *operation, void *a, void *b, void *c, void *d,
                            void *algorithm, struct heuristic *result) {
    memset(result, 0, sizeof *result);
    return OK;
}
SUCCEEDS(cublasDestroy_v2) SUCCEEDS(cublasSetStream_v2) SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSetMathMode) SUCCEEDS(cublasSetPointerMode_v2) SUCCEEDS(cublasSetSmCountTarget)
SUCCEEDS(cublasLtDestroy) SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatmulDescGetAttribute) SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute) SUCCEEDS(cublasLtMatmulDescInit_internal)
SUCCEEDS(cublasLtMatrixLayoutInit_internal) SUCCEEDS(cublasLtMatmulPreferenceInit_internal)
SUCCEEDS(cublasLtGroupedMatrixLayoutInit_internal) SUCCEEDS(cublasLtMatmulAlgoInit)
SUCCEEDS(cublasLtMatmulAlgoConfigSetAttribute) SUCCEEDS(cublasLtMatmulAlgoConfigGetAttribute)
SUCCEEDS(cublasLtMatmulAlgoCapGetAttribute) SUCCEEDS(cublasLoggerConfigure)
SUCCEEDS(cublasLtLoggerSetLevel)
#define GEMM(name) int name() { return gemm(); }
#define ALL_TYPES(name) GEMM(cublasS##name) GEMM(cublasD##name) GEMM(cublasC##name) GEMM(cublasZ##name)
ALL_TYPES(gemm_v2) ALL_TYPES(gemv_v2) ALL_TYPES(gemmStridedBatched) ALL_TYPES(gemmBatched)
ALL_TYPES(trsm_v2) ALL_TYPES(trsmBatched) ALL_TYPES(gelsBatched) ALL_TYPES(geqrfBatched)
ALL_TYPES(getrfBatched) ALL_TYPES(getrsBatched)
GEMM(cublasSdot_v2) GEMM(cublasDdot_v2) GEMM(cublasCdotu_v2) GEMM(cublasCdotc_v2)
GEMM(cublasZdotu_v2) GEMM(cublasZdotc_v2) GEMM(cublasDotEx) GEMM(cublasSgemmEx) GEMM(cublasGemmEx)
GEMM(cublasGemmStridedBatchedEx) GEMM(cublasGemmBatchedEx) GEMM(cublasLtMatmul)

// ---- cuDNN: each graph has one engine, which needs no workspace ----
HANDS_OUT(cudnnCreate)
int cudnnGetStream(void *handle, void **stream) { *stream = 0; return OK; }
size_t cudnnGetCudartVersion(void) { return CUDA_VERSION; }
void cudnnGetLastErrorString(char *text, size_t n) { if (n) *text = 0; }
int cudnnBackendCreateDescriptor(int type, void **d) { *d = calloc(1, 64); return OK; }
int cudnnBackendDestroyDescriptor(void *d) { free(d); return OK; }
int cudnnBackendGetAttribute(void *d, int name, int type, long long wanted, long long *n, void *values) {
    enum { INT64 = 3, INT32 = 23, RESULTS = 202, ENGINE = 300, CONFIGURATION = 401 };
    int number = (type == INT64 || type == INT32) && wanted > 0 && values;  // each number asked for is a workspace's size: 0
    if (number) memset(values, 0, type == INT64 ? 8 : 4);
    if (n) *n = number || name == RESULTS || name == ENGINE || name == CONFIGURATION;
    return OK;
}
int cudnnBackendExecute(void *handle, void *plan, void *variants) {
    COUNT(CONVOLUTIONS, 1);
    return simulated_launch(0);
}
SUCCEEDS(cudnnDestroy) SUCCEEDS(cudnnSetStream) SUCCEEDS(cudnnBackendSetAttribute)
SUCCEEDS(cudnnBackendFinalize)

// ---- NVRTC: each program compiles to an empty one ----
HANDS_OUT(nvrtcCreateProgram)
int nvrtcAddNameExpression(void **program, const char *name) { *program = strdup(name); return OK; }
int nvrtcGetLoweredName(void **program, const char *name, const char **lowered) {
    *lowered = *program ? *program : "kernel";
    return OK;
}
static int one(size_t *n) { *n = 1; return OK; }
int nvrtcGetPTXSize(void *program, size_t *n) { return one(n); }
int nvrtcGetCUBINSize(void *program, size_t *n) { return one(n); }
int nvrtcGetProgramLogSize(void *program, size_t *n) { return one(n); }
static int empty(char *text) { *text = 0; return OK; }
int nvrtcGetPTX(void *program, char *text) { return empty(text); }
int nvrtcGetCUBIN(void *program, char *text) { return empty(text); }
int nvrtcGetProgramLog(void *program, char *text) { return empty(text); }
SUCCEEDS(nvrtcCompileProgram) SUCCEEDS(nvrtcDestroyProgram)

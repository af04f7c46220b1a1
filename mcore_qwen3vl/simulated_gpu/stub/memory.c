// Device and pinned memory, and copies between them.
#include "stub.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, ALIGNMENT = 512, GRANULARITY = 2 << 20, MIB = 1 << 20 };
#define UP(n, to) (((n) + (to) - 1) & ~((u64)(to) - 1))

u64 simulated_capacity;
void *simulated_base;
static char *arena, *top;
static u64 arena_size = 16ull << 40, copy_limit;
static Slot *sizes;  // keys: addresses of allocations; values: bytes
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void *simulated_pages(u64 bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *p = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    return p == MAP_FAILED ? 0 : p;
}

Slot *simulated_slot(Slot *table, const void *key) {
    u64 i = ((u64)key * 0x9E3779B97F4A7C15ull) >> 44;  // 20 bits, for SLOTS = 2^20
    while (table[i].key && table[i].key != key) i = (i + 1) & (SLOTS - 1);
    return &table[i];
}

void simulated_set_memory(double gib) {
    simulated_capacity = (u64)(gib * (1ull << 30));
}

__attribute__((constructor)) static void start(void) {
    while (!(arena = simulated_pages(arena_size)))
        if ((arena_size /= 2) < 1ull << 36) {
            perror("simulated GPU: no address space");
            abort();
        }
    madvise(arena, arena_size, MADV_NOHUGEPAGE);
    madvise(arena, arena_size, MADV_DONTDUMP);
    Dl_info own;
    dladdr((void *)start, &own);
    simulated_base = own.dli_fbase;
    top = arena;
    sizes = simulated_pages(SLOTS * sizeof(Slot));
    simulated_set_memory(simulated_setting("SIMULATED_GPU_GIB", 80));
    u64 context = (u64)(simulated_setting("SIMULATED_GPU_CONTEXT_MIB", 600) * MIB);
    simulated_count[USED] = simulated_count[PEAK_USED] = context;
    copy_limit = (u64)(simulated_setting("SIMULATED_GPU_COPY_MIB", 64) * MIB);
    simulated_capability = (int)simulated_setting("SIMULATED_GPU_CAPABILITY", 90);
    simulated_events_complete_late(simulated_setting("SIMULATED_GPU_LATE", 0) != 0);
}

int simulated_on_device(const void *p) {
    return (char *)p >= arena && (char *)p < arena + arena_size;
}

static int last_error;
int simulated_fail(int error) { return last_error = error; }
int simulated_take_error(int clear) {
    int error = last_error;
    if (clear) last_error = OK;
    return error;
}

// ---- device memory: bytes in use, and addresses ----
static int take(u64 bytes) {
    u64 *used = &simulated_count[USED], *peak = &simulated_count[PEAK_USED];
    if (*used + bytes > simulated_capacity) return 0;
    *used += bytes;
    if (*used > *peak) *peak = *used;
    return 1;
}
static void *reserve(u64 bytes) {  // addresses are not reused: there are 16 TB
    char *p = top;
    bytes = UP(bytes, GRANULARITY);
    if (bytes > (u64)(arena + arena_size - top)) return 0;
    top += bytes;
    return p;
}
int simulated_take(u64 bytes) {
    pthread_mutex_lock(&lock);
    int taken = take(bytes);
    pthread_mutex_unlock(&lock);
    return taken;
}
void simulated_give_back(u64 bytes) {
    pthread_mutex_lock(&lock);
    simulated_count[USED] -= bytes;
    pthread_mutex_unlock(&lock);
}
void *simulated_reserve(u64 bytes) {
    pthread_mutex_lock(&lock);
    void *p = reserve(bytes);
    pthread_mutex_unlock(&lock);
    return p;
}
void simulated_forget(void *p, u64 bytes) { madvise(p, UP(bytes, PAGE), MADV_DONTNEED); }

int cudaMalloc(void **p, size_t bytes) {
    u64 rounded = UP(bytes ? bytes : 1, ALIGNMENT);
    COUNT(MALLOCS, 1);
    *p = 0;
    pthread_mutex_lock(&lock);
    if (take(rounded) && !(*p = reserve(rounded))) simulated_count[USED] -= rounded;
    if (*p) *simulated_slot(sizes, *p) = (Slot){*p, rounded};
    pthread_mutex_unlock(&lock);
    return *p ? OK : simulated_fail(NO_MEMORY);
}
int cudaFree(void *p) {
    if (!p) return OK;
    pthread_mutex_lock(&lock);
    Slot *slot = simulated_slot(sizes, p);
    u64 bytes = slot->key ? slot->value : 0;
    if (bytes) {
        simulated_count[USED] -= bytes;
        slot->value = 0;
        simulated_forget(p, bytes);
    }
    pthread_mutex_unlock(&lock);
    COUNT(FREES, 1);
    simulated_host_sync(SYNC_FREE, bytes);
    return OK;
}
int cudaMallocAsync(void **p, size_t bytes, void *stream) { return cudaMalloc(p, bytes); }
int cudaFreeAsync(void *p, void *stream) { return cudaFree(p); }
int cudaMallocManaged(void **p, size_t bytes, unsigned flags) { return cudaMalloc(p, bytes); }
int cudaGetSymbolAddress(void **p, const void *symbol) { return cudaMalloc(p, PAGE); }
int cudaMemGetInfo(size_t *available, size_t *total) {
    *total = simulated_capacity;
    *available = simulated_capacity - simulated_count[USED];
    return OK;
}

// ---- pinned host memory ----
enum { MOST_PINS = 1 << 14 };
static struct { char *from; u64 size; } pins[MOST_PINS];
static int used_pins;

static void pin(void *p, u64 bytes) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < used_pins && pins[i].from) i++;
    if (i < MOST_PINS) {
        pins[i].from = p;
        pins[i].size = bytes;
        if (i == used_pins) used_pins++;
    }
    u64 *now = &simulated_count[PINNED], *peak = &simulated_count[PEAK_PINNED];
    *now += bytes;
    if (*now > *peak) *peak = *now;
    pthread_mutex_unlock(&lock);
}
static u64 unpin(void *p) {
    u64 bytes = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < used_pins && !bytes; i++)
        if (pins[i].from == p) {
            bytes = pins[i].size;
            pins[i].from = 0;
        }
    simulated_count[PINNED] -= bytes;
    pthread_mutex_unlock(&lock);
    return bytes;
}
static int is_pinned(const void *p) {
    for (int i = 0; i < used_pins; i++) {
        char *from = pins[i].from;
        if (from && (char *)p >= from && (char *)p < from + pins[i].size) return 1;
    }
    return 0;
}
int cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
    if (!(*p = simulated_pages(bytes ? bytes : 1))) return simulated_fail(NO_MEMORY);
    pin(*p, bytes);
    return OK;
}
int cudaMallocHost(void **p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }
int cudaFreeHost(void *p) {
    u64 bytes = unpin(p);
    if (bytes) munmap(p, bytes);
    return OK;
}
int cudaHostRegister(void *p, size_t bytes, unsigned flags) { pin(p, bytes); return OK; }
int cudaHostUnregister(void *p) { unpin(p); return OK; }
int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = host; return OK; }

struct attributes { int type, device; void *on_device, *on_host; };
int cudaPointerGetAttributes(struct attributes *a, const void *p) {
    enum { UNREGISTERED, HOST, DEVICE };
    a->type = simulated_on_device(p) ? DEVICE : is_pinned(p) ? HOST : UNREGISTERED;
    a->device = a->type == DEVICE ? 0 : -1;
    a->on_device = a->type ? (void *)p : 0;
    a->on_host = a->type == DEVICE ? 0 : (void *)p;
    return OK;
}

// ---- copies ----
int simulated_copy(void *to, const void *from, u64 bytes, int blocking) {
    int to_device = simulated_on_device(to), from_device = simulated_on_device(from);
    if (!bytes) return OK;
    if (to_device && from_device) { COUNT(D2D, 1); COUNT(D2D_BYTES, bytes); }
    else if (to_device) { COUNT(H2D, 1); COUNT(H2D_BYTES, bytes); }
    else if (from_device) { COUNT(D2H, 1); COUNT(D2H_BYTES, bytes); }
    // Large copies within the device are skipped: the host reads the values of small tensors only.
    if (bytes <= (to_device && from_device ? (u64)MIB : copy_limit)) memmove(to, from, bytes);
    if (blocking) simulated_host_sync(SYNC_COPY, bytes);
    else if (from_device && !to_device && !is_pinned(to)) simulated_host_sync(SYNC_TO_PAGEABLE, bytes);
    else if (to_device && !from_device && !is_pinned(from)) simulated_host_sync(SYNC_FROM_PAGEABLE, bytes);
    else simulated_enqueued();
    return OK;
}
int cudaMemcpy(void *to, const void *from, size_t n, int kind) { return simulated_copy(to, from, n, 1); }
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream) {
    return simulated_copy(to, from, n, 0);
}
int cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, void *stream) {
    return simulated_copy(to, from, n, 0);
}
int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                      size_t height, int kind, void *stream) {
    COUNT(D2D, 1);
    COUNT(D2D_BYTES, width * height);
    return OK;
}
SUCCEEDS(cudaMemcpyToSymbol)
SUCCEEDS(cudaMemcpyToSymbolAsync)

int cudaMemset(void *p, int value, size_t bytes) {
    COUNT(MEMSETS, 1);
    simulated_enqueued();
    if (!value && bytes >= MIB) {  // return whole pages to the system: they read as zeros
        char *from = (char *)UP((u64)p, PAGE), *to = (char *)(((u64)p + bytes) & ~(u64)(PAGE - 1));
        memset(p, 0, from - (char *)p);
        madvise(from, to - from, MADV_DONTNEED);
        memset(to, 0, (char *)p + bytes - to);
    } else if (bytes <= MIB) memset(p, value, bytes);
    return OK;
}
int cudaMemsetAsync(void *p, int value, size_t bytes, void *stream) { return cudaMemset(p, value, bytes); }

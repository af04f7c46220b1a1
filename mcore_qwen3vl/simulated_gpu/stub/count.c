// Counters, host syncs, and the clock of events.
#include "stub.h"
#include <stdlib.h>

u64 simulated_count[COUNTERS];
static void (*on_host_sync)(int kind, u64 bytes);
static __thread int just_copied;
static u64 now = 1, completed = 0;  // events recorded up to `completed` are complete
static int late;

u64 *simulated_counters(void) { return simulated_count; }
void simulated_on_host_sync(void (*function)(int, u64)) { on_host_sync = function; }
void simulated_events_complete_late(int yes) { late = yes; }

double simulated_setting(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text && *text ? atof(text) : otherwise;
}

void *simulated_token(void) { return calloc(1, 16); }

void simulated_enqueued(void) { just_copied = 0; }

void simulated_host_sync(int kind, u64 bytes) {
    completed = now;
    // PyTorch synchronizes the stream after a blocking copy. That is one host sync, not two.
    if (just_copied && kind == SYNC_STREAM) {
        just_copied = 0;
        return;
    }
    just_copied = kind == SYNC_TO_PAGEABLE || kind == SYNC_FROM_PAGEABLE;
    COUNT(HOST_SYNCS, 1);
    if (on_host_sync) on_host_sync(kind, bytes);
}

u64 simulated_event_record(void) { return ++now; }
int simulated_event_pending(u64 recorded) { return late && recorded > completed; }

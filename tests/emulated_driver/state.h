/* What the files of the emulated driver share: the state of this process, and what they ask of each other.
 *
 * One lock guards all of it (`LOCKED`); streams are threads that let go of it while they do work, and a waiter lets go
 * of it while it waits. So after every wait anything found before may be gone: hold it (`pins`, `refs`) or find it
 * anew. Functions without "API" expect the lock to be held, unless they say otherwise.
 */
#ifndef EMUCUDA_STATE_H
#define EMUCUDA_STATE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "cuda_api.h"

#define EXPORTED __attribute__((visibility("default")))
#define API      EXPORTED CUresult

enum { MAX_DEVICES = 16, DRIVER_VERSION = 13000, PAGE_BYTES = 4096 };
#define GRANULARITY (2ull << 20)

/* ---------------------------------------------------------------- structures */

struct CUctx_st {
    CUdevice device;
    bool primary, alive;
    int retained;   /* of a primary context: it ends with the last release */
    unsigned peers; /* one bit for each device whose memory it was given access to */
    CUstream default_stream;
};

typedef enum { COPY, FILL, CALL_HOST, RECORD_EVENT, WAIT_FOR_EVENT } Work;

typedef struct Operation {
    Work work;
    uint64_t ticket; /* the order in which this process queued its work, over all streams */
    struct Operation *next;

    char *destination;
    const char *source;
    size_t size;
    unsigned char value;
    struct Memory *pinned[2];

    CUhostFn function;
    void *argument;

    CUevent event;
    uint64_t record; /* which of the event's records is made, or waited for */
} Operation;

struct CUstream_st {
    CUcontext context;
    unsigned flags;
    bool is_default, closing;
    Operation *first, *last; /* the first one is the one being done */
    CUstream next;
};

/* The part of an event that lives in a memfd, for all processes that know the event. */
typedef struct {
    _Atomic uint64_t recorded, completed;
} EventPage;

struct CUevent_st {
    CUcontext context;
    unsigned flags;
    bool imported;
    int fd;
    uint64_t cookie;
    EventPage *page;
    int refs; /* its handle, and each queued operation or waiter */
    CUevent next;
};

typedef struct Physical { /* cuMemCreate: memory without an address */
    CUmemGenericAllocationHandle handle;
    int fd;
    size_t size;
    CUdevice device;
    int refs; /* its handle, and each mapping */
    bool released;
    struct Physical *next;
} Physical;

typedef enum { ALLOCATED, IMPORTED, MAPPED, HOST_ALLOCATED, HOST_REGISTERED } MemoryKind;

typedef struct Memory {
    MemoryKind kind;
    CUdeviceptr address;
    size_t size;
    char *host; /* where this process can touch it; host memory: its address itself */
    CUcontext context;
    CUdevice device;
    uint64_t buffer_id;

    int fd;                /* ALLOCATED, IMPORTED: the memfd */
    uint64_t cookie;       /* ALLOCATED, IMPORTED: names the memfd */
    CUipcMemHandle handle; /* IMPORTED: what it was opened with */
    int opened;            /* IMPORTED: how often */
    Physical *physical;    /* MAPPED */

    int pins; /* queued work that touches it */
    bool dead;
    struct Memory *next;
} Memory;

typedef enum { OPEN_MEMORY, CLOSE_MEMORY, ALLOCATE, FREE, N_COUNTED } CountedCall;

extern struct Driver {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* work was queued, done, released or given up */
    _Atomic pid_t process;  /* that called cuInit; 0 before */

    int n_devices;
    int physical_device[MAX_DEVICES]; /* by ordinal: CUDA_VISIBLE_DEVICES may hide and reorder them */
    size_t total_bytes, used_bytes[MAX_DEVICES];
    bool peer_access, ipc;
    long delay_us, open_delay_us;

    struct CUctx_st primary[MAX_DEVICES];
    CUstream streams;
    CUevent events;
    Memory *memories;
    Physical *physicals;
    uint64_t tickets, buffer_ids;
    _Atomic unsigned long long calls[N_COUNTED];
} driver;

/* ---------------------------------------------------------------- lock and errors */

static inline pthread_mutex_t *take_lock(void)
{
    pthread_mutex_lock(&driver.lock);
    return &driver.lock;
}

static inline void give_lock(pthread_mutex_t **lock)
{
    pthread_mutex_unlock(*lock);
}

/* Take the lock until the end of the enclosing block, whichever way it is left. */
#define LOCKED pthread_mutex_t *locked __attribute__((cleanup(give_lock), unused)) = take_lock()

/* Return the error of a step that fails. */
#define TRY(step)                                                                                                      \
    do {                                                                                                               \
        CUresult result_ = (step);                                                                                     \
        if (result_ != CUDA_SUCCESS)                                                                                   \
            return result_;                                                                                            \
    } while (0)

/* ---------------------------------------------------------------- what the files ask of each other */

/* devices.c; the first three need no lock */
CUresult initialised(void); /* NOT_INITIALIZED also in a child of fork() */
CUresult valid_device(CUdevice device);
void device_uuid(int physical_device, CUuuid *uuid);

/* contexts.c; needs no lock */
CUresult current_context(CUcontext *context);

/* streams.c */
extern __thread bool in_host_function;
CUstream stream_find(CUcontext context, CUstream handle); /* NULL: there is no such stream */
void streams_end(CUcontext context);
uint64_t enqueue(CUstream stream, Operation operation);
void wait_for_work(CUcontext context, CUstream stream, uint64_t ticket); /* stream NULL: all of the context */
void nap(long us);                                                       /* lets go of the lock */

/* events.c */
CUevent event_find(CUevent handle);
CUresult event_new(CUcontext context, unsigned flags, int fd, uint64_t cookie, bool imported, CUevent *event);
void event_put(CUevent event);
void event_complete(CUevent event, uint64_t record);
void events_end(CUcontext context);

/* memory.c */
uint64_t new_cookie(void);
int new_memfd(const char *what, uint64_t cookie, size_t size);
void *reserve_addresses(size_t size, size_t alignment);
Memory *memory_find(CUdeviceptr address);
Memory *memory_in(CUdeviceptr start, size_t size);
Memory *memory_new(MemoryKind kind, CUcontext context, size_t size);
CUresult memory_map(Memory *memory, int fd, uint64_t cookie);
void memory_unpin(Memory *memory);
void memory_end(Memory *memory);
void memories_end(CUcontext context);

/* vmm.c */
void physical_put(Physical *physical);

/* hooks.c, for tests; these take the lock themselves */
EXPORTED void *emucudaHostPointer(CUdeviceptr address);
EXPORTED CUdeviceptr emucudaDevicePointer(const void *host);
EXPORTED void emucudaSetDelay(long us);
EXPORTED int emucudaLive(int *imports);
EXPORTED unsigned long long emucudaCalls(const char *name);

#endif

/* Emulated driver: streams. Each is a thread that works through its own queue, asynchronously to the caller.
 *
 * Real: work of one stream happens in its order, work of two streams in any; the legacy default stream waits for what
 * was queued before on the blocking streams of its context, and they for it; destroying a stream does not wait for it.
 * Not real: the speed. Copies and fills take EMUCUDA_DELAY_US longer than the CPU needs, so that a forgotten wait is
 * seen. The per-thread default stream is the legacy one.
 */
#include "state.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { POLL_US = 50 };
__thread bool in_host_function;

/* ---------------------------------------------------------------- waiting */

static struct timespec after(struct timespec start, long us)
{
    start.tv_sec += us / 1000000;
    start.tv_nsec += us % 1000000 * 1000;
    if (start.tv_nsec >= 1000000000) {
        start.tv_sec++;
        start.tv_nsec -= 1000000000;
    }
    return start;
}

static struct timespec now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time;
}

static bool is_past(struct timespec deadline)
{
    struct timespec time = now();
    return time.tv_sec != deadline.tv_sec ? time.tv_sec > deadline.tv_sec : time.tv_nsec >= deadline.tv_nsec;
}

void nap(long us)
{
    struct timespec deadline = after(now(), us);
    pthread_cond_clockwait(&driver.changed, &driver.lock, CLOCK_MONOTONIC, &deadline);
}

/* The delay is read anew at every change: emucudaSetDelay(0) also lets go the work that is being held. */
static void wait_as_a_slow_device_would(void)
{
    struct timespec began = now();
    for (;;) {
        struct timespec deadline = after(began, driver.delay_us);
        if (is_past(deadline))
            return;
        pthread_cond_clockwait(&driver.changed, &driver.lock, CLOCK_MONOTONIC, &deadline);
    }
}

static bool order_each_other(CUstream a, CUstream b)
{
    bool both_block = !(a->flags & CU_STREAM_NON_BLOCKING) && !(b->flags & CU_STREAM_NON_BLOCKING);
    return a != b && a->context == b->context && both_block && (a->is_default || b->is_default);
}

/* Of the given stream only the address is used, unless it is the default stream: it may be gone after a wait. */
static bool is_pending(CUcontext context, CUstream stream, uint64_t ticket)
{
    bool is_default = stream && stream == context->default_stream;
    for (CUstream other = driver.streams; other; other = other->next) {
        bool counts = !stream || other == stream || (is_default && order_each_other(stream, other));
        if (counts && other->context == context && other->first && other->first->ticket <= ticket)
            return true;
    }
    return false;
}

void wait_for_work(CUcontext context, CUstream stream, uint64_t ticket)
{
    while (is_pending(context, stream, ticket))
        pthread_cond_wait(&driver.changed, &driver.lock);
}

/* ---------------------------------------------------------------- the thread of a stream */

static bool must_wait_for_another(CUstream stream)
{
    for (CUstream other = driver.streams; other; other = other->next)
        if (order_each_other(stream, other) && other->first && other->first->ticket < stream->first->ticket)
            return true;
    return false;
}

/* Without the lock. */
static void do_work(const Operation *operation)
{
    switch (operation->work) {
    case COPY:
        memmove(operation->destination, operation->source, operation->size);
        break;
    case FILL:
        memset(operation->destination, operation->value, operation->size);
        break;
    case CALL_HOST:
        in_host_function = true;
        operation->function(operation->argument);
        in_host_function = false;
        break;
    case RECORD_EVENT:
        event_complete(operation->event, operation->record);
        break;
    case WAIT_FOR_EVENT:
        break;
    }
}

static void finish_first(CUstream stream)
{
    Operation *done = stream->first;
    stream->first = done->next;
    if (!stream->first)
        stream->last = NULL;
    for (int i = 0; i < 2; i++)
        if (done->pinned[i])
            memory_unpin(done->pinned[i]);
    if (done->event)
        event_put(done->event);
    free(done);
    pthread_cond_broadcast(&driver.changed);
}

static void *work_off(void *argument)
{
    CUstream stream = argument;
    LOCKED;
    while (stream->first || !stream->closing) {
        Operation *operation = stream->first;
        if (!operation || must_wait_for_another(stream)) {
            pthread_cond_wait(&driver.changed, &driver.lock);
            continue;
        }
        if (operation->work == WAIT_FOR_EVENT && operation->event->page->completed < operation->record) {
            nap(POLL_US); /* it may be another process that completes it */
            continue;
        }
        if (operation->work == COPY || operation->work == FILL)
            wait_as_a_slow_device_would();
        pthread_mutex_unlock(&driver.lock);
        do_work(operation);
        pthread_mutex_lock(&driver.lock);
        finish_first(stream);
    }
    CUstream *link = &driver.streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    free(stream);
    return NULL;
}

/* ---------------------------------------------------------------- for the other files */

static CUstream stream_new(CUcontext context, unsigned flags, bool is_default)
{
    CUstream stream = calloc(1, sizeof *stream);
    if (!stream)
        return NULL;
    *stream = (struct CUstream_st){context, flags, is_default, false, NULL, NULL, driver.streams};
    sigset_t all, before; /* signals are for the threads of the program: a call they should interrupt must be theirs */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    bool started = pthread_create(&thread, NULL, work_off, stream) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!started) {
        free(stream);
        return NULL;
    }
    pthread_detach(thread);
    return driver.streams = stream;
}

static bool names_default(CUstream handle)
{
    return !handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD;
}

CUstream stream_find(CUcontext context, CUstream handle)
{
    if (names_default(handle)) {
        if (!context->default_stream)
            context->default_stream = stream_new(context, 0, true);
        return context->default_stream;
    }
    for (CUstream stream = driver.streams; stream; stream = stream->next)
        if (stream == handle && !stream->closing)
            return stream;
    return NULL;
}

void streams_end(CUcontext context)
{
    for (CUstream stream = driver.streams; stream; stream = stream->next)
        if (stream->context == context)
            stream->closing = true;
    context->default_stream = NULL;
    pthread_cond_broadcast(&driver.changed);
}

uint64_t enqueue(CUstream stream, Operation work)
{
    Operation *operation = malloc(sizeof *operation);
    if (!operation)
        abort(); /* a queue with a hole would be worse than no process */
    *operation = work;
    operation->ticket = ++driver.tickets;
    operation->next = NULL;
    for (int i = 0; i < 2; i++)
        if (operation->pinned[i])
            operation->pinned[i]->pins++;
    if (operation->event)
        operation->event->refs++;
    if (stream->last)
        stream->last->next = operation;
    else
        stream->first = operation;
    stream->last = operation;
    pthread_cond_broadcast(&driver.changed);
    return operation->ticket;
}

/* ---------------------------------------------------------------- API */

API cuStreamCreate(CUstream *stream, unsigned flags)
{
    CUcontext context;
    TRY(current_context(&context));
    if (!stream || flags & ~CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    *stream = stream_new(context, flags, false);
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
    (void)priority; /* a wish */
    return cuStreamCreate(stream, flags);
}

API cuStreamDestroy_v2(CUstream handle)
{
    TRY(initialised());
    LOCKED;
    CUstream stream = names_default(handle) ? NULL : stream_find(NULL, handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    stream->closing = true;
    pthread_cond_broadcast(&driver.changed);
    return CUDA_SUCCESS;
}

API cuStreamSynchronize(CUstream handle)
{
    CUcontext context;
    TRY(current_context(&context));
    LOCKED;
    CUstream stream = stream_find(context, handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    wait_for_work(stream->context, stream, driver.tickets);
    return CUDA_SUCCESS;
}

API cuStreamQuery(CUstream handle)
{
    CUcontext context;
    TRY(current_context(&context));
    LOCKED;
    CUstream stream = stream_find(context, handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    return is_pending(stream->context, stream, driver.tickets) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

API cuStreamGetFlags(CUstream handle, unsigned *flags)
{
    CUcontext context;
    TRY(current_context(&context));
    LOCKED;
    CUstream stream = stream_find(context, handle);
    if (!stream || !flags)
        return stream ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

API cuStreamGetCtx(CUstream handle, CUcontext *of)
{
    CUcontext context;
    TRY(current_context(&context));
    LOCKED;
    CUstream stream = stream_find(context, handle);
    if (!stream || !of)
        return stream ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *of = stream->context;
    return CUDA_SUCCESS;
}

API cuLaunchHostFunc(CUstream handle, CUhostFn function, void *argument)
{
    CUcontext context;
    TRY(current_context(&context));
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    CUstream stream = stream_find(context, handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    enqueue(stream, (Operation){.work = CALL_HOST, .function = function, .argument = argument});
    return CUDA_SUCCESS;
}

/* Emulated driver: events.
 *
 * An event counts its records: how many were asked for, and the newest one that was reached. Both counts lie in a
 * memfd, so that an event opened in another process is the same event.
 *
 * Real: a wait is for the record that was newest when the wait was asked for; a never recorded event is complete.
 * Not real: times. An event that is recorded on two streams in turn may let a waiter for the older record go when the
 * newer one is reached. A wait for a record whose process died never ends (nobody documents what a GPU does then).
 */
#include "state.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { POLL_US = 50 };

CUevent event_find(CUevent handle)
{
    for (CUevent event = driver.events; event; event = event->next)
        if (event == handle)
            return event;
    return NULL;
}

/* Owns the descriptor from here on, also if it fails. */
CUresult event_new(CUcontext context, unsigned flags, int fd, uint64_t cookie, bool imported, CUevent *event)
{
    EventPage *page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CUevent created = page != MAP_FAILED ? malloc(sizeof *created) : NULL;
    if (!created) {
        if (page != MAP_FAILED)
            munmap(page, PAGE_BYTES);
        close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *created = (struct CUevent_st){context, flags, imported, fd, cookie, page, 1, driver.events};
    *event = driver.events = created;
    return CUDA_SUCCESS;
}

void event_put(CUevent event)
{
    if (--event->refs)
        return;
    munmap(event->page, PAGE_BYTES);
    close(event->fd);
    free(event);
}

/* Records can be reached out of order: keep the newest. Without the lock. */
void event_complete(CUevent event, uint64_t record)
{
    uint64_t completed = event->page->completed;
    while (completed < record && !atomic_compare_exchange_weak(&event->page->completed, &completed, record))
        ;
}

static void event_end(CUevent event)
{
    CUevent *link = &driver.events;
    while (*link != event)
        link = &(*link)->next;
    *link = event->next;
    event_put(event);
}

void events_end(CUcontext context)
{
    for (CUevent event = driver.events, next; event; event = next) {
        next = event->next;
        if (event->context == context)
            event_end(event);
    }
}

/* ---------------------------------------------------------------- API */

API cuEventCreate(CUevent *event, unsigned flags)
{
    CUcontext context;
    TRY(current_context(&context));
    if (!event || flags & ~(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS))
        return CUDA_ERROR_INVALID_VALUE;
    if (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    uint64_t cookie = new_cookie();
    int fd = new_memfd("event", cookie, PAGE_BYTES);
    return fd < 0 ? CUDA_ERROR_OUT_OF_MEMORY : event_new(context, flags, fd, cookie, false, event);
}

API cuEventDestroy_v2(CUevent handle)
{
    TRY(initialised());
    LOCKED;
    CUevent event = event_find(handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    event_end(event);
    return CUDA_SUCCESS;
}

API cuEventRecord(CUevent handle, CUstream stream_handle)
{
    CUcontext context;
    TRY(current_context(&context));
    LOCKED;
    CUevent event = event_find(handle);
    CUstream stream = stream_find(context, stream_handle);
    if (!event || !stream || stream->context != event->context)
        return CUDA_ERROR_INVALID_HANDLE;
    uint64_t record = ++event->page->recorded;
    enqueue(stream, (Operation){.work = RECORD_EVENT, .event = event, .record = record});
    return CUDA_SUCCESS;
}

API cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags)
{
    CUcontext context;
    TRY(current_context(&context));
    if (flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    CUevent event = event_find(handle);
    CUstream stream = stream_find(context, stream_handle);
    if (!event || !stream)
        return CUDA_ERROR_INVALID_HANDLE;
    enqueue(stream, (Operation){.work = WAIT_FOR_EVENT, .event = event, .record = event->page->recorded});
    return CUDA_SUCCESS;
}

API cuEventQuery(CUevent handle)
{
    TRY(initialised());
    LOCKED;
    CUevent event = event_find(handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    return event->page->completed >= event->page->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API cuEventSynchronize(CUevent handle)
{
    TRY(initialised());
    LOCKED;
    CUevent event = event_find(handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    event->refs++;
    uint64_t record = event->page->recorded;
    while (event->page->completed < record)
        nap(POLL_US); /* it may be another process that completes it */
    event_put(event);
    return CUDA_SUCCESS;
}

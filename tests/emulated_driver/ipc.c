/* Emulated driver: memory and events handed to another process (cuIpc*).
 *
 * A handle says which descriptor of which process holds the memfd, and how that memfd is named. The opener goes through
 * /proc/PID/fd, so the sharing is real, and a handle is worth nothing once its exporter freed the memory or died.
 *
 * Real: whole allocations are mapped; a second open in the same context counts and gives the same address; what must
 * not be opened or exported is refused. The error codes are what documents and other people's tests say.
 * Not real: what becomes of a mapping whose exporter freed it (poison) or died (it stays). Rely on neither.
 */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    char what[8]; /* "mem" or "event" */
    int32_t process, fd;
    uint64_t process_started; /* a number of a process comes again, but not with this */
    uint64_t cookie, size;
    int32_t physical_device;
    char zero[20];
} Origin;

static_assert(sizeof(Origin) == sizeof(CUipcMemHandle), "a handle is all of it");

/* ---------------------------------------------------------------- origins */

/* When a process began, in ticks since boot; 0: there is none, or it is only waiting to be buried. */
static uint64_t start_of(pid_t process)
{
    enum { STATE = 3, START = 22 }; /* fields of /proc/PID/stat, counted from 1 */
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length > 0 ? length : 0] = '\0';
    char *field = strrchr(text, ')'); /* the end of field 2, which may itself hold blanks */
    for (int number = STATE; field && (field = strchr(field, ' ')); number++) {
        field++;
        if (number == STATE && (*field == 'Z' || *field == 'X'))
            return 0;
        if (number == START)
            return strtoull(field, NULL, 10);
    }
    return 0;
}

static Origin origin_of(const char *what, int fd, uint64_t cookie, size_t size, CUdevice device)
{
    Origin origin = {.process = getpid(), .fd = fd, .cookie = cookie, .size = size};
    strncpy(origin.what, what, sizeof origin.what);
    origin.process_started = start_of(origin.process);
    origin.physical_device = driver.physical_device[device];
    return origin;
}

/* The exporter's descriptor as a path, if it still is what the handle says. */
static CUresult origin_path(const Origin *origin, const char *what, char path[64])
{
    char expected[8] = {0}, name[128], found[128];
    strncpy(expected, what, sizeof expected);
    if (memcmp(origin->what, expected, sizeof expected) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (origin->process == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!origin->process_started || start_of(origin->process) != origin->process_started)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(path, 64, "/proc/%d/fd/%d", origin->process, origin->fd);
    ssize_t length = readlink(path, found, sizeof found - 1);
    if (length < 0)
        return errno == EACCES || errno == EPERM ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_INVALID_VALUE;
    found[length] = '\0';
    snprintf(name, sizeof name, "/memfd:emucuda-%s-%016llx (deleted)", what, (unsigned long long)origin->cookie);
    return strcmp(found, name) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; /* freed, and the number used again */
}

static CUresult origin_open(const Origin *origin, const char *what, int *fd)
{
    char path[64];
    TRY(origin_path(origin, what, path));
    *fd = open(path, O_RDWR | O_CLOEXEC);
    return *fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

static CUresult ready_for_ipc(CUcontext *context)
{
    TRY(current_context(context));
    return driver.ipc ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

/* ---------------------------------------------------------------- memory */

API cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    CUcontext context;
    TRY(ready_for_ipc(&context));
    LOCKED;
    Memory *memory = memory_find(address);
    if (!handle || !memory || memory->kind != ALLOCATED)
        return CUDA_ERROR_INVALID_VALUE;
    Origin origin = origin_of("mem", memory->fd, memory->cookie, memory->size, memory->device);
    memcpy(handle, &origin, sizeof origin);
    return CUDA_SUCCESS;
}

/* The ordinal here of the device that memory lies on; that of the context, if the device is hidden. */
static CUdevice device_of(const Origin *origin, CUcontext context)
{
    for (CUdevice device = 0; device < driver.n_devices; device++)
        if (driver.physical_device[device] == origin->physical_device)
            return device;
    return context->device;
}

static CUresult import(const CUipcMemHandle *handle, const Origin *origin, CUcontext context, Memory **memory)
{
    int fd;
    TRY(origin_open(origin, "mem", &fd));
    *memory = memory_new(IMPORTED, context, origin->size);
    if (!*memory) {
        close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    (*memory)->handle = *handle;
    (*memory)->opened = 1;
    (*memory)->device = device_of(origin, context);
    CUresult result = memory_map(*memory, fd, origin->cookie);
    if (result != CUDA_SUCCESS)
        memory_end(*memory);
    return result;
}

API cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags)
{
    driver.calls[OPEN_MEMORY]++;
    CUcontext context;
    TRY(ready_for_ipc(&context));
    if (!address || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    struct timespec delay = {driver.open_delay_us / 1000000, driver.open_delay_us % 1000000 * 1000};
    nanosleep(&delay, NULL);
    LOCKED;
    Origin origin;
    char path[64];
    memcpy(&origin, &handle, sizeof origin);
    TRY(origin_path(&origin, "mem", path));
    for (Memory *memory = driver.memories; memory; memory = memory->next) {
        if (memory->dead || memory->kind != IMPORTED || memcmp(&memory->handle, &handle, sizeof handle) != 0)
            continue;
        if (memory->context == context) {
            memory->opened++;
            *address = memory->address;
            return CUDA_SUCCESS;
        }
        if (memory->context->device == context->device)
            return CUDA_ERROR_INVALID_HANDLE; /* one context of a device for each exporting process */
    }
    if (driver.physical_device[context->device] != origin.physical_device) {
        if (!driver.peer_access)
            return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
        context->peers |= 1u << device_of(&origin, context);
    }
    Memory *memory;
    TRY(import(&handle, &origin, context, &memory));
    *address = memory->address;
    return CUDA_SUCCESS;
}

API cuIpcCloseMemHandle(CUdeviceptr address)
{
    driver.calls[CLOSE_MEMORY]++;
    CUcontext context;
    TRY(ready_for_ipc(&context));
    LOCKED;
    Memory *memory = memory_find(address);
    if (!memory || memory->address != address || memory->kind != IMPORTED)
        return CUDA_ERROR_INVALID_VALUE;
    if (!--memory->opened)
        memory_end(memory);
    return CUDA_SUCCESS;
}

/* ---------------------------------------------------------------- events */

API cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event_handle)
{
    CUcontext context;
    TRY(ready_for_ipc(&context));
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    CUevent event = event_find(event_handle);
    if (!event || event->imported || !(event->flags & CU_EVENT_INTERPROCESS))
        return CUDA_ERROR_INVALID_HANDLE;
    Origin origin = origin_of("event", event->fd, event->cookie, PAGE_BYTES, event->context->device);
    memcpy(handle, &origin, sizeof origin);
    return CUDA_SUCCESS;
}

API cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle)
{
    CUcontext context;
    TRY(ready_for_ipc(&context));
    if (!event)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    Origin origin;
    memcpy(&origin, &handle, sizeof origin);
    int fd;
    TRY(origin_open(&origin, "event", &fd));
    return event_new(context, CU_EVENT_DISABLE_TIMING, fd, origin.cookie, true, event);
}

/* Emulated driver: virtual memory management (cuMemCreate, cuMemMap).
 *
 * It is here to show how device memory looks that cuIpcGetMemHandle refuses: engines use it for memory that grows or
 * sleeps. Real: the steps and their order. Not real: a mapping is always the whole of what was created, access rights
 * are not enforced, and nothing can be exported as a file descriptor.
 */
#include "state.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct Reservation {
    CUdeviceptr start;
    size_t size;
    struct Reservation *next;
} Reservation;

static Reservation *reservations;
static CUmemGenericAllocationHandle handles;

static Physical *physical_find(CUmemGenericAllocationHandle handle)
{
    for (Physical *physical = driver.physicals; physical; physical = physical->next)
        if (physical->handle == handle && !physical->released)
            return physical;
    return NULL;
}

void physical_put(Physical *physical)
{
    if (--physical->refs)
        return;
    Physical **link = &driver.physicals;
    while (*link != physical)
        link = &(*link)->next;
    *link = physical->next;
    driver.used_bytes[physical->device] -= physical->size;
    close(physical->fd);
    free(physical);
}

API cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                  CUmemAllocationGranularity_flags option)
{
    (void)option;
    TRY(initialised());
    if (!granularity || !properties)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

API cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                unsigned long long flags)
{
    if (!handle || !size || size % GRANULARITY || flags || !properties)
        return CUDA_ERROR_INVALID_VALUE;
    if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED || properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    CUdevice device = properties->location.id;
    TRY(valid_device(device));
    if (properties->requestedHandleTypes)
        return CUDA_ERROR_NOT_SUPPORTED;
    LOCKED;
    if (size > driver.total_bytes - driver.used_bytes[device])
        return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = new_memfd("phys", new_cookie(), size);
    Physical *physical = fd >= 0 ? malloc(sizeof *physical) : NULL;
    if (!physical) {
        if (fd >= 0)
            close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *physical = (Physical){++handles, fd, size, device, 1, false, driver.physicals};
    driver.physicals = physical;
    driver.used_bytes[device] += size;
    *handle = physical->handle;
    return CUDA_SUCCESS;
}

API cuMemRelease(CUmemGenericAllocationHandle handle)
{
    TRY(initialised());
    LOCKED;
    Physical *physical = physical_find(handle);
    if (!physical)
        return CUDA_ERROR_INVALID_VALUE;
    physical->released = true;
    physical_put(physical);
    return CUDA_SUCCESS;
}

API cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags)
{
    (void)wish;
    TRY(initialised());
    if (!start || !size || size % GRANULARITY || flags || alignment & (alignment - 1))
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    Reservation *reservation = malloc(sizeof *reservation);
    void *addresses = reservation ? reserve_addresses(size, alignment > GRANULARITY ? alignment : GRANULARITY) : NULL;
    if (!addresses) {
        free(reservation);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *reservation = (Reservation){(CUdeviceptr)addresses, size, reservations};
    reservations = reservation;
    *start = reservation->start;
    return CUDA_SUCCESS;
}

API cuMemAddressFree(CUdeviceptr start, size_t size)
{
    TRY(initialised());
    LOCKED;
    for (Reservation **link = &reservations; *link; link = &(*link)->next) {
        Reservation *reservation = *link;
        if (reservation->start != start || reservation->size != size || memory_in(start, size))
            continue;
        *link = reservation->next;
        munmap((void *)start, size);
        free(reservation);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static bool is_reserved(CUdeviceptr start, size_t size)
{
    for (Reservation *reservation = reservations; reservation; reservation = reservation->next)
        if (start >= reservation->start && start + size <= reservation->start + reservation->size)
            return true;
    return false;
}

API cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags)
{
    CUcontext context;
    TRY(current_context(&context));
    LOCKED;
    Physical *physical = physical_find(handle);
    if (!physical || offset || size != physical->size || flags || !is_reserved(start, size) || memory_in(start, size))
        return CUDA_ERROR_INVALID_VALUE;
    void *host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, physical->fd, 0);
    Memory *memory = host != MAP_FAILED ? memory_new(MAPPED, context, size) : NULL;
    if (!memory) {
        if (host != MAP_FAILED)
            munmap(host, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memory->address = start;
    memory->host = host;
    memory->device = physical->device;
    memory->physical = physical;
    physical->refs++;
    return CUDA_SUCCESS;
}

API cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *rights, size_t n)
{
    TRY(initialised());
    LOCKED;
    Memory *memory = memory_in(start, size);
    return memory && memory->kind == MAPPED && rights && n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuMemUnmap(CUdeviceptr start, size_t size)
{
    TRY(initialised());
    LOCKED;
    Memory *memory = memory_find(start);
    if (!memory || memory->kind != MAPPED || memory->address != start || memory->size != size)
        return CUDA_ERROR_INVALID_VALUE;
    memory_end(memory);
    return CUDA_SUCCESS;
}

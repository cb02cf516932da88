/* Emulated driver: memory of the device and of the host, and what a pointer can be asked.
 *
 * Device memory is a memfd with two mappings: the device address, which the CPU cannot touch (SIGSEGV, as with a GPU),
 * and a host alias, through which the emulated driver does its work.
 *
 * Real: freeing waits for the work of the context; nothing is left in /dev/shm, even after SIGKILL.
 * Not real: freed memory is filled with 0xDB first, so that whoever still reads it never finds plausible old values.
 * Each allocation has pages of its own (a GPU's small ones share 2 MiB blocks), and the memory used is counted for this
 * process alone.
 */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

enum { POISON = 0xDB };

/* ---------------------------------------------------------------- structures */

/* Names a memfd so that no other one, of any process, is taken for it. */
uint64_t new_cookie(void)
{
    uint64_t cookie = 0;
    if (getrandom(&cookie, sizeof cookie, 0) != sizeof cookie)
        abort();
    return cookie;
}

int new_memfd(const char *what, uint64_t cookie, size_t size)
{
    char name[64];
    snprintf(name, sizeof name, "emucuda-%s-%016llx", what, (unsigned long long)cookie);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)size) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static size_t rounded_up(size_t size, size_t multiple)
{
    return (size + multiple - 1) / multiple * multiple;
}

/* Addresses that nothing else gets and that the CPU cannot touch; NULL: there are none. */
void *reserve_addresses(size_t size, size_t alignment)
{
    char *start = mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    char *aligned = (char *)rounded_up((uintptr_t)start, alignment);
    if (aligned != start)
        munmap(start, (size_t)(aligned - start));
    munmap(aligned + size, (size_t)(start + alignment - aligned));
    return aligned;
}

/* Any live memory that has a byte in this range. */
Memory *memory_in(CUdeviceptr start, size_t size)
{
    for (Memory *memory = driver.memories; memory; memory = memory->next)
        if (!memory->dead && memory->address < start + size && start < memory->address + memory->size)
            return memory;
    return NULL;
}

Memory *memory_find(CUdeviceptr address)
{
    return memory_in(address, 1);
}

Memory *memory_new(MemoryKind kind, CUcontext context, size_t size)
{
    Memory *memory = malloc(sizeof *memory);
    if (!memory)
        return NULL;
    *memory = (Memory){.kind = kind, .context = context, .device = context->device, .size = size};
    memory->fd = -1;
    memory->buffer_id = ++driver.buffer_ids;
    memory->next = driver.memories;
    return driver.memories = memory;
}

/* Give memory of this process the bytes of a memfd, and an address. Owns the descriptor, also if it fails. */
CUresult memory_map(Memory *memory, int fd, uint64_t cookie)
{
    memory->fd = fd;
    memory->cookie = cookie;
    void *host = mmap(NULL, memory->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (host == MAP_FAILED)
        return CUDA_ERROR_MAP_FAILED;
    memory->host = host;
    memory->address = (CUdeviceptr)reserve_addresses(rounded_up(memory->size, GRANULARITY), GRANULARITY);
    return memory->address ? CUDA_SUCCESS : CUDA_ERROR_MAP_FAILED;
}

static void memory_reap(Memory *memory)
{
    Memory **link = &driver.memories;
    while (*link != memory)
        link = &(*link)->next;
    *link = memory->next;
    bool of_device = memory->kind == ALLOCATED || memory->kind == IMPORTED;
    if (memory->host && memory->kind != HOST_REGISTERED)
        munmap(memory->host, memory->size);
    if (of_device && memory->address)
        munmap((void *)memory->address, rounded_up(memory->size, GRANULARITY));
    if (memory->physical)
        physical_put(memory->physical);
    if (memory->fd >= 0)
        close(memory->fd);
    free(memory);
}

void memory_unpin(Memory *memory)
{
    if (!--memory->pins && memory->dead)
        memory_reap(memory);
}

/* No call finds it any more; its pages go when no queued work needs them. */
void memory_end(Memory *memory)
{
    memory->dead = true;
    if (memory->kind == ALLOCATED)
        driver.used_bytes[memory->device] -= memory->size;
    if (memory->kind == ALLOCATED && memory->host)
        memset(memory->host, POISON, memory->size);
    memory->pins++;
    memory_unpin(memory);
}

void memories_end(CUcontext context)
{
    for (Memory *memory = driver.memories, *next; memory; memory = next) {
        next = memory->next;
        if (memory->context == context && !memory->dead)
            memory_end(memory);
    }
}

/* Several threads may free the same memory: only the first one finds it. */
static CUresult free_after_work(CUdeviceptr address, MemoryKind kind, CUresult unknown)
{
    Memory *memory = memory_find(address);
    if (!memory || memory->address != address || memory->kind != kind)
        return unknown;
    memory->dead = true;
    memory->pins++;
    wait_for_work(memory->context, NULL, driver.tickets);
    memory->pins--;
    memory_end(memory);
    return CUDA_SUCCESS;
}

/* ---------------------------------------------------------------- API: the device's memory */

API cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    driver.calls[ALLOCATE]++;
    CUcontext context;
    TRY(current_context(&context));
    if (!address || !size)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    size_t *used = &driver.used_bytes[context->device];
    if (size > driver.total_bytes || rounded_up(size, PAGE_BYTES) > driver.total_bytes - *used)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size = rounded_up(size, PAGE_BYTES);
    uint64_t cookie = new_cookie();
    int fd = new_memfd("mem", cookie, size);
    Memory *memory = fd >= 0 ? memory_new(ALLOCATED, context, size) : NULL;
    if (!memory) {
        if (fd >= 0)
            close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *used += size;
    if (memory_map(memory, fd, cookie) != CUDA_SUCCESS) {
        memory_end(memory);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *address = memory->address;
    return CUDA_SUCCESS;
}

API cuMemFree_v2(CUdeviceptr address)
{
    driver.calls[FREE]++;
    CUcontext context;
    TRY(current_context(&context));
    if (!address)
        return CUDA_SUCCESS;
    LOCKED;
    return free_after_work(address, ALLOCATED, CUDA_ERROR_INVALID_VALUE);
}

API cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    CUcontext context;
    TRY(current_context(&context));
    if (!free_bytes || !total_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    *total_bytes = driver.total_bytes;
    *free_bytes = driver.total_bytes - driver.used_bytes[context->device];
    return CUDA_SUCCESS;
}

API cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    CUcontext context;
    TRY(current_context(&context));
    LOCKED;
    Memory *memory = memory_find(address);
    if (!memory || memory->kind == HOST_ALLOCATED || memory->kind == HOST_REGISTERED)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = memory->address;
    if (size)
        *size = memory->size;
    return CUDA_SUCCESS;
}

/* ---------------------------------------------------------------- API: the host's memory */

API cuMemHostAlloc(void **address, size_t size, unsigned flags)
{
    (void)flags;
    CUcontext context;
    TRY(current_context(&context));
    if (!address || !size)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    void *host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    Memory *memory = host != MAP_FAILED ? memory_new(HOST_ALLOCATED, context, size) : NULL;
    if (!memory) {
        if (host != MAP_FAILED)
            munmap(host, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memory->host = *address = host;
    memory->address = (CUdeviceptr)host;
    return CUDA_SUCCESS;
}

API cuMemAllocHost_v2(void **address, size_t size)
{
    return cuMemHostAlloc(address, size, 0);
}

API cuMemFreeHost(void *address)
{
    CUcontext context;
    TRY(current_context(&context));
    LOCKED;
    return free_after_work((CUdeviceptr)address, HOST_ALLOCATED, CUDA_ERROR_INVALID_VALUE);
}

/* Any memory of this process can be registered, also a stretch of a mapped file. */
API cuMemHostRegister_v2(void *address, size_t size, unsigned flags)
{
    (void)flags;
    CUcontext context;
    TRY(current_context(&context));
    if (!address || !size)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    if (memory_in((CUdeviceptr)address, size))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    Memory *memory = memory_new(HOST_REGISTERED, context, size);
    if (!memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memory->host = address;
    memory->address = (CUdeviceptr)address;
    return CUDA_SUCCESS;
}

API cuMemHostUnregister(void *address)
{
    CUcontext context;
    TRY(current_context(&context));
    if (!address)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    return free_after_work((CUdeviceptr)address, HOST_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

/* ---------------------------------------------------------------- API: what a pointer can be asked */

static CUresult attribute_of(CUdeviceptr address, CUpointer_attribute attribute, void *data)
{
    Memory *memory = memory_find(address);
    if (!memory || !data)
        return CUDA_ERROR_INVALID_VALUE;
    bool of_host = memory->kind == HOST_ALLOCATED || memory->kind == HOST_REGISTERED;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = memory->context;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = of_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = address;
        break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (!of_host)
            return CUDA_ERROR_INVALID_VALUE;
        *(void **)data = (void *)address;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)data = memory->buffer_id;
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned char *)data = false;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = memory->device;
        break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned char *)data = driver.ipc && memory->kind == ALLOCATED;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = memory->address;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = memory->size;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

API cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address)
{
    TRY(initialised());
    LOCKED;
    return attribute_of(address, attribute, data);
}

/* As documented, an address that CUDA does not know is no error here: what cannot be told is zero. */
API cuPointerGetAttributes(unsigned n, CUpointer_attribute *attributes, void **data, CUdeviceptr address)
{
    TRY(initialised());
    LOCKED;
    for (unsigned i = 0; i < n; i++) {
        if (attribute_of(address, attributes[i], data[i]) == CUDA_SUCCESS)
            continue;
        switch ((int)attributes[i]) {
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
            *(unsigned char *)data[i] = 0;
            break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *(unsigned *)data[i] = 0;
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *(int *)data[i] = -2;
            break;
        default:
            *(uint64_t *)data[i] = 0;
        }
    }
    return CUDA_SUCCESS;
}

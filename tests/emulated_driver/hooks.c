/* Emulated driver: what tests can ask and set. None of this is part of CUDA, and its presence says: not a GPU.
 *
 * They need no context. Before cuInit, and in a child of fork(), there is nothing to tell.
 */
#include "state.h"

#include <string.h>

/* Where the CPU can touch the memory of this device address. */
void *emucudaHostPointer(CUdeviceptr address)
{
    if (initialised() != CUDA_SUCCESS)
        return NULL;
    LOCKED;
    Memory *memory = memory_find(address);
    return memory ? memory->host + (address - memory->address) : NULL;
}

/* The reverse; 0: no live memory of the device, imported or own, has its host alias there. */
CUdeviceptr emucudaDevicePointer(const void *host)
{
    if (initialised() != CUDA_SUCCESS)
        return 0;
    LOCKED;
    const char *byte = host;
    for (Memory *memory = driver.memories; memory; memory = memory->next) {
        bool of_host = memory->kind == HOST_ALLOCATED || memory->kind == HOST_REGISTERED;
        if (!memory->dead && !of_host && byte >= memory->host && byte < memory->host + memory->size)
            return memory->address + (CUdeviceptr)(byte - memory->host);
    }
    return 0;
}

/* From now on, also for work that is being delayed: a long delay holds all copies and fills back, 0 lets them go. */
void emucudaSetDelay(long us)
{
    if (initialised() != CUDA_SUCCESS)
        return;
    LOCKED;
    driver.delay_us = us;
    pthread_cond_broadcast(&driver.changed);
}

/* How many allocations of cuMemAlloc, and how many imports, this process has. */
int emucudaLive(int *imports)
{
    int counts[2] = {0, 0};
    if (initialised() == CUDA_SUCCESS) {
        LOCKED;
        for (Memory *memory = driver.memories; memory; memory = memory->next)
            if (!memory->dead && (memory->kind == ALLOCATED || memory->kind == IMPORTED))
                counts[memory->kind == IMPORTED]++;
    }
    if (imports)
        *imports = counts[1];
    return counts[0];
}

/* How often this process called it, with or without success; -1 (all bits): that call is not counted. */
unsigned long long emucudaCalls(const char *name)
{
    static const char *names[N_COUNTED] = {
        [OPEN_MEMORY] = "cuIpcOpenMemHandle",
        [CLOSE_MEMORY] = "cuIpcCloseMemHandle",
        [ALLOCATE] = "cuMemAlloc",
        [FREE] = "cuMemFree",
    };
    for (int i = 0; i < N_COUNTED; i++)
        if (strcmp(name, names[i]) == 0)
            return driver.calls[i];
    return ~0ull;
}

/* Emulated driver: copies and fills, all of them work of a stream.
 *
 * Real: which calls return before the work is done. Between device addresses none waits, not even cuMemcpyDtoD; with
 * pinned host memory the Async ones do not; with pageable host memory each one waits (a GPU's driver may return
 * earlier, once it has staged what it reads).
 * Not real: the speed.
 */
#include "state.h"

typedef struct {
    char *bytes;
    Memory *memory; /* NULL: pageable host memory */
    bool of_device;
} Place;

typedef enum { ON_DEVICE, ANYWHERE } Where;

/* What this address means to the CPU; the whole range must be of one memory. */
static CUresult place_at(CUdeviceptr address, size_t size, Where where, Place *place)
{
    Memory *memory = memory_in(address, size);
    if (!memory) {
        *place = (Place){(char *)address, NULL, false};
        return where == ON_DEVICE || !address ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    }
    if (address < memory->address || size > memory->size - (address - memory->address))
        return CUDA_ERROR_INVALID_VALUE;
    bool of_device = memory->kind != HOST_ALLOCATED && memory->kind != HOST_REGISTERED;
    *place = (Place){memory->host + (address - memory->address), memory, of_device};
    return CUDA_SUCCESS;
}

typedef struct {
    CUdeviceptr address;
    Where where;
} End;

static CUresult copy(End to, End from, size_t size, CUstream handle, bool asynchronous)
{
    CUcontext context;
    TRY(current_context(&context));
    LOCKED;
    CUstream stream = stream_find(context, handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!size)
        return CUDA_SUCCESS;
    Place target, source;
    TRY(place_at(to.address, size, to.where, &target));
    TRY(place_at(from.address, size, from.where, &source));
    context = stream->context;
    Operation work = {.work = COPY, .destination = target.bytes, .source = source.bytes, .size = size};
    work.pinned[0] = target.memory;
    work.pinned[1] = source.memory;
    uint64_t ticket = enqueue(stream, work);
    bool within_devices = target.of_device && source.of_device;
    bool pageable = !target.memory || !source.memory;
    if (pageable || (!asynchronous && !within_devices))
        wait_for_work(context, stream, ticket);
    return CUDA_SUCCESS;
}

static CUresult fill(CUdeviceptr address, unsigned char value, size_t size, CUstream handle)
{
    CUcontext context;
    TRY(current_context(&context));
    LOCKED;
    CUstream stream = stream_find(context, handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!size)
        return CUDA_SUCCESS;
    Place target;
    TRY(place_at(address, size, ON_DEVICE, &target));
    Operation work = {.work = FILL, .destination = target.bytes, .value = value, .size = size};
    work.pinned[0] = target.memory;
    enqueue(stream, work);
    return CUDA_SUCCESS;
}

static End device(CUdeviceptr address)
{
    return (End){address, ON_DEVICE};
}

static End host(const void *address)
{
    return (End){(CUdeviceptr)address, ANYWHERE};
}

static End any(CUdeviceptr address)
{
    return (End){address, ANYWHERE};
}

API cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return copy(any(to), any(from), size, NULL, false);
}

API cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
    return copy(device(to), host(from), size, NULL, false);
}

API cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
    return copy(host(to), device(from), size, NULL, false);
}

API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return copy(device(to), device(from), size, NULL, false);
}

API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy(any(to), any(from), size, stream, true);
}

API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    return copy(device(to), host(from), size, stream, true);
}

API cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy(host(to), device(from), size, stream, true);
}

API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy(device(to), device(from), size, stream, true);
}

API cuMemcpyPeer(CUdeviceptr to, CUcontext of_to, CUdeviceptr from, CUcontext of_from, size_t size)
{
    (void)of_to, (void)of_from; /* an address says of itself whose it is */
    return copy(device(to), device(from), size, NULL, false);
}

API cuMemcpyPeerAsync(CUdeviceptr to, CUcontext of_to, CUdeviceptr from, CUcontext of_from, size_t size,
                      CUstream stream)
{
    (void)of_to, (void)of_from;
    return copy(device(to), device(from), size, stream, true);
}

API cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t size)
{
    return fill(address, value, size, NULL);
}

API cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t size, CUstream stream)
{
    return fill(address, value, size, stream);
}

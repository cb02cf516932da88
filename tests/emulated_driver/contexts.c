/* Emulated driver: contexts, the stack of them that each thread has, and peer access.
 *
 * Real: primary contexts are counted; a context that ended takes its streams, events and memory along, and its use
 * answers CONTEXT_IS_DESTROYED. Not real: the topology of peer access is one yes or no (EMUCUDA_P2P) for all pairs.
 */
#include "state.h"

#include <stdlib.h>

enum { MAX_DEPTH = 16 };
static __thread CUcontext stack[MAX_DEPTH];
static __thread int depth;

CUresult current_context(CUcontext *context)
{
    TRY(initialised());
    if (!depth || !stack[depth - 1])
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[depth - 1];
    return (*context)->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

static void context_end(CUcontext context)
{
    streams_end(context);
    events_end(context);
    memories_end(context);
    context->alive = false;
}

API cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    TRY(valid_device(device));
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    CUcontext primary = &driver.primary[device];
    if (!primary->alive)
        *primary = (struct CUctx_st){.device = device, .primary = true, .alive = true};
    primary->retained++;
    *context = primary;
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    TRY(valid_device(device));
    LOCKED;
    CUcontext primary = &driver.primary[device];
    if (!primary->retained)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (--primary->retained)
        return CUDA_SUCCESS;
    wait_for_work(primary, NULL, driver.tickets);
    if (primary->alive && !primary->retained) /* nobody retained it while we waited */
        context_end(primary);
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    TRY(valid_device(device));
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = 0;
    *active = driver.primary[device].alive;
    return CUDA_SUCCESS;
}

API cuCtxSetCurrent(CUcontext context)
{
    TRY(initialised());
    if (!context) { /* as documented: the same as a pop */
        if (depth)
            depth--;
        return CUDA_SUCCESS;
    }
    if (!depth)
        depth = 1;
    stack[depth - 1] = context;
    return CUDA_SUCCESS;
}

API cuCtxGetCurrent(CUcontext *context)
{
    TRY(initialised());
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

API cuCtxPushCurrent_v2(CUcontext context)
{
    TRY(initialised());
    if (!context || depth == MAX_DEPTH)
        return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

API cuCtxPopCurrent_v2(CUcontext *context)
{
    TRY(initialised());
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    return CUDA_SUCCESS;
}

API cuCtxGetDevice(CUdevice *device)
{
    CUcontext context;
    TRY(current_context(&context));
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
}

API cuCtxSynchronize(void)
{
    CUcontext context;
    TRY(current_context(&context));
    LOCKED;
    wait_for_work(context, NULL, driver.tickets);
    return CUDA_SUCCESS;
}

API cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device)
{
    (void)flags;
    TRY(valid_device(device));
    if (!context || depth == MAX_DEPTH)
        return CUDA_ERROR_INVALID_VALUE;
    CUcontext created = calloc(1, sizeof *created);
    if (!created)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *created = (struct CUctx_st){.device = device, .alive = true};
    *context = stack[depth++] = created;
    return CUDA_SUCCESS;
}

API cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinity, int n, unsigned flags, CUdevice device)
{
    (void)affinity, (void)n;
    return cuCtxCreate_v2(context, flags, device);
}

API cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned flags, CUdevice device)
{
    (void)parameters;
    return cuCtxCreate_v2(context, flags, device);
}

API cuCtxDestroy_v2(CUcontext context)
{
    TRY(initialised());
    if (!context || context->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    LOCKED;
    wait_for_work(context, NULL, driver.tickets);
    if (!context->alive)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    context_end(context); /* the structure stays: what still names it must be told, and not crash */
    if (depth && stack[depth - 1] == context)
        depth--;
    return CUDA_SUCCESS;
}

API cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    TRY(valid_device(device));
    TRY(valid_device(peer));
    if (!can)
        return CUDA_ERROR_INVALID_VALUE;
    *can = device != peer && driver.peer_access;
    return CUDA_SUCCESS;
}

API cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    CUcontext context;
    TRY(current_context(&context));
    if (!peer || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (peer->device == context->device)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!driver.peer_access)
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    LOCKED;
    if (context->peers >> peer->device & 1)
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    context->peers |= 1u << peer->device;
    return CUDA_SUCCESS;
}

API cuCtxDisablePeerAccess(CUcontext peer)
{
    CUcontext context;
    TRY(current_context(&context));
    if (!peer)
        return CUDA_ERROR_INVALID_VALUE;
    LOCKED;
    if (!(context->peers >> peer->device & 1))
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    context->peers &= ~(1u << peer->device);
    return CUDA_SUCCESS;
}

/* Emulated driver: names of errors, and the look-up of functions by name and version.
 *
 * A client asks for "cuMemAlloc" of version 12000 and gets the newest variant that is not newer. What is not in the
 * table does not exist here: cuda-python then raises at the call, and names the function.
 */
#include "state.h"

#include <string.h>

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
#define ROW(name, value, text) {value, #name, text},
    FOR_EACH_ERROR(ROW)
#undef ROW
};
enum { N_ERRORS = sizeof errors / sizeof *errors };

API cuGetErrorName(CUresult error, const char **name)
{
    *name = NULL;
    for (int i = 0; i < N_ERRORS; i++)
        if (errors[i].code == (int)error)
            *name = errors[i].name;
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuGetErrorString(CUresult error, const char **text)
{
    *text = NULL;
    for (int i = 0; i < N_ERRORS; i++)
        if (errors[i].code == (int)error)
            *text = errors[i].text;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Name, the first version of CUDA that had this variant, the function that is this variant. */
#define FOR_EACH_FUNCTION(_)                                                                                           \
    _(cuGetErrorName, 6000, cuGetErrorName)                                                                            \
    _(cuGetErrorString, 6000, cuGetErrorString)                                                                        \
    _(cuGetProcAddress, 12000, cuGetProcAddress_v2)                                                                    \
    _(cuInit, 2000, cuInit)                                                                                            \
    _(cuDriverGetVersion, 2020, cuDriverGetVersion)                                                                    \
    _(cuDeviceGetCount, 2000, cuDeviceGetCount)                                                                        \
    _(cuDeviceGet, 2000, cuDeviceGet)                                                                                  \
    _(cuDeviceGetName, 2000, cuDeviceGetName)                                                                          \
    _(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2)                                                                      \
    _(cuDeviceGetUuid, 9020, cuDeviceGetUuid)                                                                          \
    _(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2)                                                                     \
    _(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId)                                                                  \
    _(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute)                                                                \
    _(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain)                                                        \
    _(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2)                                                  \
    _(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState)                                                    \
    _(cuCtxSetCurrent, 4000, cuCtxSetCurrent)                                                                          \
    _(cuCtxGetCurrent, 4000, cuCtxGetCurrent)                                                                          \
    _(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2)                                                                     \
    _(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2)                                                                       \
    _(cuCtxGetDevice, 2000, cuCtxGetDevice)                                                                            \
    _(cuCtxSynchronize, 2000, cuCtxSynchronize)                                                                        \
    _(cuCtxCreate, 3020, cuCtxCreate_v2)                                                                               \
    _(cuCtxCreate, 11040, cuCtxCreate_v3)                                                                              \
    _(cuCtxCreate, 12050, cuCtxCreate_v4)                                                                              \
    _(cuCtxDestroy, 4000, cuCtxDestroy_v2)                                                                             \
    _(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer)                                                              \
    _(cuCtxEnablePeerAccess, 4000, cuCtxEnablePeerAccess)                                                              \
    _(cuCtxDisablePeerAccess, 4000, cuCtxDisablePeerAccess)                                                            \
    _(cuStreamCreate, 2000, cuStreamCreate)                                                                            \
    _(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority)                                                    \
    _(cuStreamDestroy, 4000, cuStreamDestroy_v2)                                                                       \
    _(cuStreamSynchronize, 2000, cuStreamSynchronize)                                                                  \
    _(cuStreamQuery, 2000, cuStreamQuery)                                                                              \
    _(cuStreamGetFlags, 5050, cuStreamGetFlags)                                                                        \
    _(cuStreamGetCtx, 9020, cuStreamGetCtx)                                                                            \
    _(cuLaunchHostFunc, 10000, cuLaunchHostFunc)                                                                       \
    _(cuEventCreate, 2000, cuEventCreate)                                                                              \
    _(cuEventDestroy, 4000, cuEventDestroy_v2)                                                                         \
    _(cuEventRecord, 2000, cuEventRecord)                                                                              \
    _(cuStreamWaitEvent, 3020, cuStreamWaitEvent)                                                                      \
    _(cuEventQuery, 2000, cuEventQuery)                                                                                \
    _(cuEventSynchronize, 2000, cuEventSynchronize)                                                                    \
    _(cuMemAlloc, 3020, cuMemAlloc_v2)                                                                                 \
    _(cuMemFree, 3020, cuMemFree_v2)                                                                                   \
    _(cuMemGetInfo, 3020, cuMemGetInfo_v2)                                                                             \
    _(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2)                                                             \
    _(cuMemHostAlloc, 2020, cuMemHostAlloc)                                                                            \
    _(cuMemAllocHost, 3020, cuMemAllocHost_v2)                                                                         \
    _(cuMemFreeHost, 2000, cuMemFreeHost)                                                                              \
    _(cuMemHostRegister, 6050, cuMemHostRegister_v2)                                                                   \
    _(cuMemHostUnregister, 4000, cuMemHostUnregister)                                                                  \
    _(cuPointerGetAttribute, 4000, cuPointerGetAttribute)                                                              \
    _(cuPointerGetAttributes, 7000, cuPointerGetAttributes)                                                            \
    _(cuMemcpy, 4000, cuMemcpy)                                                                                        \
    _(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2)                                                                             \
    _(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2)                                                                             \
    _(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2)                                                                             \
    _(cuMemcpyAsync, 4000, cuMemcpyAsync)                                                                              \
    _(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2)                                                                   \
    _(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2)                                                                   \
    _(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2)                                                                   \
    _(cuMemcpyPeer, 4000, cuMemcpyPeer)                                                                                \
    _(cuMemcpyPeerAsync, 4000, cuMemcpyPeerAsync)                                                                      \
    _(cuMemsetD8, 3020, cuMemsetD8_v2)                                                                                 \
    _(cuMemsetD8Async, 3020, cuMemsetD8Async)                                                                          \
    _(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle)                                                                      \
    _(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2)                                                                \
    _(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle)                                                                  \
    _(cuIpcGetEventHandle, 4010, cuIpcGetEventHandle)                                                                  \
    _(cuIpcOpenEventHandle, 4010, cuIpcOpenEventHandle)                                                                \
    _(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity)                                             \
    _(cuMemCreate, 10020, cuMemCreate)                                                                                 \
    _(cuMemRelease, 10020, cuMemRelease)                                                                               \
    _(cuMemAddressReserve, 10020, cuMemAddressReserve)                                                                 \
    _(cuMemAddressFree, 10020, cuMemAddressFree)                                                                       \
    _(cuMemMap, 10020, cuMemMap)                                                                                       \
    _(cuMemSetAccess, 10020, cuMemSetAccess)                                                                           \
    _(cuMemUnmap, 10020, cuMemUnmap)

#ifndef EMUCUDA_CHECK_HEADER
#define PROTOTYPE(name, since, function) API function();
FOR_EACH_FUNCTION(PROTOTYPE)
#endif

API cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                        CUdriverProcAddressQueryResult *status)
{
    static const struct {
        const char *name;
        int since;
        void *function;
    } functions[] = {
#define ROW(name, since, function) {#name, since, (void *)function},
        FOR_EACH_FUNCTION(ROW)
#undef ROW
    };
    (void)flags;
    if (!name || !function)
        return CUDA_ERROR_INVALID_VALUE;
    *function = NULL;
    bool known = false;
    int newest = -1;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (strcmp(functions[i].name, name) != 0)
            continue;
        known = true;
        if (functions[i].since <= version && functions[i].since > newest) {
            newest = functions[i].since;
            *function = functions[i].function;
        }
    }
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS
                  : known   ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                            : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

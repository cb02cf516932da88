/* The part of cuda.h that the emulated driver speaks: types and constants, with their values.
 *
 * Compiled with EMUCUDA_CHECK_HEADER, the types come from the real cuda.h, which then checks every prototype of the
 * emulated driver, and every constant below is compared with the one there.
 */
#ifndef EMUCUDA_CUDA_API_H
#define EMUCUDA_CUDA_API_H

#include <assert.h>
#include <stdint.h>

#define FOR_EACH_ERROR(_)                                                                                              \
    _(CUDA_SUCCESS, 0, "no error")                                                                                     \
    _(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument")                                                                 \
    _(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory")                                                                    \
    _(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error")                                                           \
    _(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")                                                 \
    _(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                                                        \
    _(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context")                                                       \
    _(CUDA_ERROR_MAP_FAILED, 205, "mapping of buffer object failed")                                                   \
    _(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217, "peer access is not supported between these two devices")               \
    _(CUDA_ERROR_OPERATING_SYSTEM, 304, "OS call failed or operation not supported on this OS")                        \
    _(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle")                                                       \
    _(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found")                                                             \
    _(CUDA_ERROR_NOT_READY, 600, "device not ready")                                                                   \
    _(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704, "peer access is already enabled")                                   \
    _(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, 705, "peer access has not been enabled")                                     \
    _(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed")                                                    \
    _(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712, "part or all of the requested memory range is already mapped")   \
    _(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713, "pointer does not correspond to a registered memory region")         \
    _(CUDA_ERROR_NOT_PERMITTED, 800, "operation not permitted")                                                        \
    _(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported")

#define FOR_EACH_CONSTANT(_)                                                                                           \
    _(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 41)                                                                      \
    _(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)                                                                \
    _(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)                                                                \
    _(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 99)                                                                 \
    _(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 102)                                                    \
    _(CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 125)                                                                    \
    _(CU_POINTER_ATTRIBUTE_CONTEXT, 1)                                                                                 \
    _(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                                                                             \
    _(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, 3)                                                                          \
    _(CU_POINTER_ATTRIBUTE_HOST_POINTER, 4)                                                                            \
    _(CU_POINTER_ATTRIBUTE_BUFFER_ID, 7)                                                                               \
    _(CU_POINTER_ATTRIBUTE_IS_MANAGED, 8)                                                                              \
    _(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)                                                                          \
    _(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, 10)                                                             \
    _(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 11)                                                                       \
    _(CU_POINTER_ATTRIBUTE_RANGE_SIZE, 12)                                                                             \
    _(CU_MEMORYTYPE_HOST, 1)                                                                                           \
    _(CU_MEMORYTYPE_DEVICE, 2)                                                                                         \
    _(CU_STREAM_NON_BLOCKING, 1)                                                                                       \
    _(CU_EVENT_BLOCKING_SYNC, 1)                                                                                       \
    _(CU_EVENT_DISABLE_TIMING, 2)                                                                                      \
    _(CU_EVENT_INTERPROCESS, 4)                                                                                        \
    _(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, 1)                                                                           \
    _(CU_MEM_ALLOCATION_TYPE_PINNED, 1)                                                                                \
    _(CU_MEM_LOCATION_TYPE_DEVICE, 1)                                                                                  \
    _(CU_GET_PROC_ADDRESS_SUCCESS, 0)                                                                                  \
    _(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, 1)                                                                         \
    _(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT, 2)

#ifdef EMUCUDA_CHECK_HEADER

#define __CUDA_API_VERSION_INTERNAL /* declare every version of a function, and rename none */
#include <cuda.h>
#define SAME_AS_IN_CUDA_H(name, value, ...) static_assert((long)(name) == (value), #name);
FOR_EACH_ERROR(SAME_AS_IN_CUDA_H)
FOR_EACH_CONSTANT(SAME_AS_IN_CUDA_H)

#else

#define DECLARE(name, value, ...) name = (value),
enum { FOR_EACH_ERROR(DECLARE) FOR_EACH_CONSTANT(DECLARE) };

typedef int CUresult, CUdevice, CUdevice_attribute, CUpointer_attribute, CUdriverProcAddressQueryResult;
typedef int CUmemAllocationGranularity_flags;
typedef uint64_t cuuint64_t;
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef void (*CUhostFn)(void *);
typedef struct CUexecAffinityParam_st CUexecAffinityParam;
typedef struct CUctxCreateParams_st CUctxCreateParams;

#define CU_STREAM_LEGACY     ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)

typedef struct {
    char bytes[16];
} CUuuid;

typedef struct {
    char reserved[64];
} CUipcMemHandle;

typedef struct {
    char reserved[64];
} CUipcEventHandle;

typedef struct {
    int type;
    int id;
} CUmemLocation;

typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

#endif

static_assert(sizeof(CUipcMemHandle) == 64 && sizeof(CUipcEventHandle) == 64, "handles are 64 bytes");
static_assert(sizeof(CUmemAllocationProp) == 32 && sizeof(CUmemAccessDesc) == 12, "the structures of cuda.h");

#endif

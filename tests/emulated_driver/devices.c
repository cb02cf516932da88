/* Emulated driver: initialisation and devices.
 *
 * Real: CUDA_VISIBLE_DEVICES (ordinals and prefixes of UUIDs, ending at the first senseless entry); a UUID belongs to
 * the device and not to its ordinal; after fork() every call of the child answers NOT_INITIALIZED.
 * Not real: the devices. There are EMUCUDA_DEVICES of them, all made of host memory, all alike but for their UUID.
 */
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct Driver driver = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static long setting(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

void device_uuid(int physical_device, CUuuid *uuid)
{
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[0] = (char)(0xE0 + physical_device);
    memcpy(uuid->bytes + 4, "EMULATED-GPU", 12);
}

static void format_uuid(int physical_device, char text[64])
{
    CUuuid uuid;
    device_uuid(physical_device, &uuid);
    text += sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        text += sprintf(text, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)uuid.bytes[i]);
}

/* The physical device that an entry of CUDA_VISIBLE_DEVICES means, or -1. */
static int named_device(const char *entry, int n_physical)
{
    if (strncmp(entry, "GPU-", 4) != 0) {
        char *end;
        long ordinal = strtol(entry, &end, 10);
        return end != entry && !*end && ordinal >= 0 && ordinal < n_physical ? (int)ordinal : -1;
    }
    int found = -1;
    for (int i = 0; i < n_physical; i++) {
        char uuid[64];
        format_uuid(i, uuid);
        if (strncmp(uuid, entry, strlen(entry)) == 0) {
            if (found >= 0)
                return -1; /* the prefix of two devices names none */
            found = i;
        }
    }
    return found;
}

static void find_devices(int n_physical)
{
    driver.n_devices = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
        for (int i = 0; i < n_physical; i++)
            driver.physical_device[driver.n_devices++] = i;
        return;
    }
    char *entries = strdup(visible), *rest = NULL;
    for (char *entry = strtok_r(entries, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest)) {
        int device = named_device(entry, n_physical);
        if (device < 0 || driver.n_devices == MAX_DEVICES)
            break;
        driver.physical_device[driver.n_devices++] = device;
    }
    free(entries);
}

/* Asked before the lock is taken: a child of fork() may have inherited it held, for ever. */
CUresult initialised(void)
{
    if (in_host_function)
        return CUDA_ERROR_NOT_PERMITTED; /* CUDA calls are forbidden there */
    return driver.process == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult valid_device(CUdevice device)
{
    TRY(initialised());
    return device >= 0 && device < driver.n_devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

API cuInit(unsigned flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (driver.process)
        return initialised();
    LOCKED;
    if (driver.process)
        return CUDA_SUCCESS; /* another thread was faster */
    long n_physical = setting("EMUCUDA_DEVICES", 1);
    find_devices(n_physical < MAX_DEVICES ? (int)n_physical : MAX_DEVICES);
    driver.total_bytes = (size_t)setting("EMUCUDA_MEM_MIB", 1024) << 20;
    driver.peer_access = setting("EMUCUDA_P2P", 1);
    driver.ipc = setting("EMUCUDA_IPC", 1);
    driver.delay_us = setting("EMUCUDA_DELAY_US", 0);
    driver.open_delay_us = setting("EMUCUDA_OPEN_DELAY_US", 0);
    if (!driver.n_devices)
        return CUDA_ERROR_NO_DEVICE;
    driver.process = getpid();
    return CUDA_SUCCESS;
}

API cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    if (driver.process)
        TRY(initialised());
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}

API cuDeviceGetCount(int *count)
{
    TRY(initialised());
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = driver.n_devices;
    return CUDA_SUCCESS;
}

API cuDeviceGet(CUdevice *device, int ordinal)
{
    TRY(valid_device(ordinal));
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

API cuDeviceGetName(char *name, int size, CUdevice device)
{
    TRY(valid_device(device));
    if (!name || size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)size, "EMULATED device (host memory, no GPU)");
    return CUDA_SUCCESS;
}

API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    TRY(valid_device(device));
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    device_uuid(driver.physical_device[device], uuid);
    return CUDA_SUCCESS;
}

API cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    return cuDeviceGetUuid_v2(uuid, device);
}

API cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    TRY(valid_device(device));
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = driver.total_bytes;
    return CUDA_SUCCESS;
}

API cuDeviceGetPCIBusId(char *id, int size, CUdevice device)
{
    TRY(valid_device(device));
    if (!id || size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(id, (size_t)size, "0000:%02X:00.0", 0xE0 + driver.physical_device[device]);
    return CUDA_SUCCESS;
}

API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    TRY(valid_device(device));
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = 9;
        break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        *value = 1;
        break;
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
        *value = driver.ipc;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}

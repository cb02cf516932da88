"""Test functions in processes that have the emulated driver, and none in the process of the tests."""

import ctypes
import os

from emulated_driver.build import build


def run(folder, switches, function, *args):
    """In a child: load the emulated driver before anything looks for one, then call `function`."""
    for name in [name for name in os.environ if name.startswith(("EMUCUDA_", "CUDA_VISIBLE"))]:
        del os.environ[name]
    os.environ.update({"EMUCUDA_DEVICES": "2", **switches})
    ctypes.CDLL(f"{folder}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    return function(*args)


def spawner(kv_spawn):
    """`spawn(function, *args, **switches)`: a process with two emulated devices, or what the switches say."""
    folder = str(build())

    def spawn(function, *args, **switches):
        return kv_spawn(run, folder, switches, function, *args)

    return spawn


def library():
    """The emulated driver's hooks, in a child."""
    hooks = ctypes.CDLL("libcuda.so.1")
    hooks.emucudaCalls.restype = ctypes.c_ulonglong
    hooks.emucudaCalls.argtypes = [ctypes.c_char_p]
    hooks.emucudaSetDelay.argtypes = [ctypes.c_long]
    return hooks


def calls(name):
    return library().emucudaCalls(name.encode())


def live():
    """(allocations, imports) of this process."""
    imports = ctypes.c_int()
    return library().emucudaLive(ctypes.byref(imports)), imports.value


def set_delay(microseconds):
    """How long each copy and fill takes from now on: a long one holds all work, 0 lets it go."""
    library().emucudaSetDelay(microseconds)

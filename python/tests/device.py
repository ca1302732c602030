# mypy: ignore-errors
"""Arrays on a CUDA device without torch: enough of the driver for tests, on a GPU or on kernels/emulator."""

import ctypes
from pathlib import Path

import numpy as np

EMULATOR = Path(__file__).resolve().parents[2] / "target/emulator/libcuda.so.1"


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
CODES = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int32": (0, 32), "int64": (0, 64)}


class Driver:
    """A device that is opened through libcuda."""

    def __init__(self, library, device=0):
        self.cuda = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.context, self.device = ctypes.c_void_p(), device
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)

    def __call__(self, name, *arguments):
        if self.context:
            self.cuda.cuCtxSetCurrent(self.context)
        error = getattr(self.cuda, name)(*arguments)
        assert error == 0, f"{name}: error {error}"

    def stream(self):
        stream = ctypes.c_void_p()
        self("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        return stream.value

    def synchronize(self, stream):
        self("cuStreamSynchronize", ctypes.c_void_p(stream))

    def capture(self, stream, body):
        """What `body` enqueues, as a graph."""
        graph, exec_ = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 0)
        body()
        self("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        self("cuGraphInstantiateWithFlags", ctypes.byref(exec_), graph, ctypes.c_ulonglong(0))
        return exec_

    def launch(self, graph, stream):
        self("cuGraphLaunch", graph, ctypes.c_void_p(stream))

    def array(self, values, kind=None):
        return Array(self, np.ascontiguousarray(values), kind or str(np.asarray(values).dtype))


class Array:
    """Numbers on the device; `kind` names their type, bfloat16 being uint16 on the host."""

    def __init__(self, driver, values, kind):
        self.driver, self.kind, self.shape, self.dtype = driver, kind, values.shape, values.dtype
        self.bytes = max(values.nbytes, 16)
        self.pointer = ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(self.pointer), ctypes.c_size_t(self.bytes))
        self._shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        code, bits = CODES[kind]
        tensor = DLTensor(self.pointer.value, 2, driver.device, len(self.shape), code, bits, 1, self._shape, None, 0)
        self._managed = Managed(tensor, None, None)
        self.write(values, None)
        driver.synchronize(None)

    def write(self, values, stream):
        """Enqueues a copy; the host's memory may be used again at once."""
        values = np.ascontiguousarray(values, self.dtype)
        self.driver(
            "cuMemcpyHtoDAsync_v2",
            self.pointer,
            values.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(values.nbytes),
            ctypes.c_void_p(stream),
        )

    def copy(self, other, stream):
        """Enqueues a copy of what another one of this size holds then."""
        bytes, stream = ctypes.c_size_t(self.bytes), ctypes.c_void_p(stream)
        self.driver("cuMemcpyDtoDAsync_v2", self.pointer, other.pointer, bytes, stream)

    def read(self, stream):
        values = np.empty(self.shape, self.dtype)
        self.driver(
            "cuMemcpyDtoHAsync_v2",
            values.ctypes.data_as(ctypes.c_void_p),
            self.pointer,
            ctypes.c_size_t(values.nbytes),
            ctypes.c_void_p(stream),
        )
        self.driver.synchronize(stream)
        return values

    def __dlpack_device__(self):
        return 2, self.driver.device

    def __dlpack__(self, *, stream=None):
        assert stream == -1, "whoever takes this works on the caller's stream, and waits for nothing"
        return new_capsule(ctypes.addressof(self._managed), b"dltensor", None)

"""The C function that tells how a tensor lies in memory, for kernels: a look at it takes no object of Python's.

DLPack is the protocol by which libraries give each other tensors. Since its version 1.3 a library's type of tensors may hold a table
of C functions: https://data-apis.org/array-api/draft/API_specification/generated/array_api.array.__dlpack_c_exchange_api__.html,
``DLPackExchangeAPI`` in https://github.com/dmlc/dlpack/blob/main/include/dlpack/dlpack.h.
"""

from __future__ import annotations

import ctypes
import functools

from torch import Tensor

MAJOR_VERSION = 1
"""Tables of another are laid out otherwise."""
PLACE = 5
"""Of ``dltensor_from_py_object_no_sync`` in the table, in words of eight bytes."""


@functools.cache
def description_function() -> int:
    """The address of ``dltensor_from_py_object_no_sync``, which fills a ``DLTensor`` in; 0 where torch has none.

    It gets the address of a tensor's object and that of the ``DLTensor``, and returns 0, or -1 and an error of Python's.
    """
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return 0
    # A function of its own: the one that `ctypes.pythonapi` gives is everybody's, and so are the types that one says it has.
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    try:
        table = pointer(capsule, b"dlpack_exchange_api")
    except ValueError:
        return 0  # no capsule, or one of another name
    if not table or ctypes.c_uint32.from_address(table).value != MAJOR_VERSION:
        return 0
    return ctypes.c_void_p.from_address(table + 8 * PLACE).value or 0


@functools.cache
def error_clearing_function() -> int:
    """The address of ``PyErr_Clear``, for who has called the other."""
    return ctypes.cast(ctypes.pythonapi.PyErr_Clear, ctypes.c_void_p).value or 0

"""What numba's code takes from LLVM itself: pointers, the bits of floats, and loops of vectors that ask memory for what comes next.

Numba's cache knows when the file of a function has changed, and nothing of what that imports: after a change here touch the others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ANY_ORDER = {"reassoc", "contract"}
"""Sums may be taken in any order, four or eight at a time. NaN, infinity and signed zero keep their meaning."""

FLOAT32_BYTES = 4
LINE_BYTES = 64
"""What memory is asked for at a time."""
BYTES_AHEAD = 4096
"""How far ahead of itself such a loop asks memory for more: one that computes as much does not make the processor do so in time."""


@intrinsic
def pointer(_context: Any, _address: Any) -> Any:  # noqa: ANN401  # numba's protocol: it is given types, and gives code
    """The pointer that an address is."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401  # as above
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def float_of(_context: Any, _bits: Any) -> Any:  # noqa: ANN401  # numba's protocol, as above
    """The float32 that has these bits, a uint32."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401  # as above
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def bits_of(_context: Any, _float: Any) -> Any:  # noqa: ANN401  # numba's protocol, as above
    """The bits of a float32, an int32."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401  # as above
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def in_wide_vectors(_context: Any) -> Any:  # noqa: ANN401  # numba's protocol, as above
    """Has the function that it is called in use vectors of 512 bits, where the processor has them: LLVM would take half of that."""

    def generate(target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:  # noqa: ANN401  # as above
        with suppress(TypeError):  # where they are no set any more, they stay as they are
            # As a set's: their own `add` does not know attributes of a target.
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return target.get_dummy_value()

    return types.none(), generate


def called(builder: Any, name: str, result: Any, *arguments: Any) -> Any:  # noqa: ANN401  # llvmlite is not annotated, here and below
    """The result of one of LLVM's own functions, which for sums may take any order."""
    of_function = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.declare_intrinsic(name, fnty=of_function)
    return builder.call(function, arguments, fastmath=["reassoc"] if "fadd" in name else [])


def spread(builder: Any, value: Any, lanes: int) -> Any:  # noqa: ANN401  # as above
    """A vector of which every lane is one value."""
    vector, index = ir.VectorType(value.type, lanes), ir.IntType(32)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, index(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(index, lanes), 0))


def ask_for(builder: Any, address: Any) -> None:  # noqa: ANN401  # as above
    """Have what is some way behind an address fetched, to be read: soon and more than once, as data. It need not be there."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte] + [number] * 3))
    ahead = builder.inttoptr(builder.add(address, address.type(BYTES_AHEAD)), byte)
    builder.call(prefetch, [ahead, number(0), number(3), number(1)])


def over_vectors(builder: Any, num_vectors: Any, nothing: list[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:  # noqa: ANN401  # as above
    """What totals have become after a loop: ``step`` gets the number of a vector and the totals so far, and gives those with it."""
    cells = [cgutils.alloca_once_value(builder, total) for total in nothing]
    with cgutils.for_range(builder, num_vectors) as loop:
        for cell, total in zip(cells, step(loop.index, [builder.load(cell) for cell in cells]), strict=True):
            builder.store(total, cell)
    return [builder.load(cell) for cell in cells]


def joined(builder: Any, name: str, total: Any, vector: Any) -> Any:  # noqa: ANN401  # as above
    """A total with all lanes of a vector, by the reduction of this name."""
    kind = f"v{vector.type.count}{vector.type.element.intrinsic_name}"
    if name == "fadd":
        return called(builder, f"llvm.vector.reduce.fadd.{kind}", total.type, total, vector)
    of_lanes = called(builder, f"llvm.vector.reduce.{name}.{kind}", total.type, vector)
    return builder.add(total, of_lanes) if name == "add" else called(builder, f"llvm.{name}.i32", total.type, total, of_lanes)


Values = Callable[[Any, list[Any], list[Any]], list[Any]]
"""What a loop adds up: from LLVM's builder, vectors of elements and of numbers to a vector for each sum, ``None`` for nothing."""


def summing_loop(lanes: int, num_sums: int, num_asked: int, values: Values) -> Any:  # noqa: ANN401  # numba's intrinsics are not annotated
    """What adds to sums in float32 what is made of the elements of tensors, vector by vector.

    It gets addresses of tensors and numbers, tuples of int64 and of float32, the address of the sums, and a number of vectors.

    Args:
        lanes: Elements of a vector.
        num_sums: How many there are.
        num_asked: Of so many tensors, the first, memory is asked for what comes next.
        values: What is added.
    """
    vector = ir.VectorType(ir.FloatType(), lanes)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ANN401  # numba's protocol, as above
        starts, given, sums, num_vectors = arguments
        addresses = [builder.extract_value(starts, place) for place in range(len(signature.args[0]))]
        numbers = [spread(builder, builder.extract_value(given, place), lanes) for place in range(len(signature.args[1]))]

        def step(place: Any, sofar: list[Any]) -> list[Any]:  # noqa: ANN401  # as above
            offset = builder.mul(place, place.type(lanes * FLOAT32_BYTES))
            at = [builder.add(address, offset) for address in addresses]
            for line in range(0, lanes * FLOAT32_BYTES, LINE_BYTES):
                for address in at[:num_asked]:
                    ask_for(builder, builder.add(address, address.type(line)))
            read = [builder.load(builder.inttoptr(address, vector.as_pointer()), align=FLOAT32_BYTES) for address in at]
            added = values(builder, read, numbers)
            return [total if one is None else builder.fadd(total, one, flags=["contract"]) for total, one in zip(sofar, added, strict=True)]

        totals = over_vectors(builder, num_vectors, [ir.Constant(vector, 0.0)] * num_sums, step)
        for place, total in enumerate(totals):
            cell = builder.inttoptr(builder.add(sums, sums.type(place * FLOAT32_BYTES)), ir.FloatType().as_pointer())
            builder.store(joined(builder, "fadd", builder.load(cell), total), cell)
        return target.get_dummy_value()

    @intrinsic
    def add(_context: Any, addresses: Any, numbers: Any, _sums: Any, _num_vectors: Any) -> Any:  # noqa: ANN401  # as above
        of_numbers = types.UniTuple(types.float32, len(numbers)) if len(numbers) else numbers
        return types.none(types.UniTuple(types.int64, len(addresses)), of_numbers, types.int64, types.int64), generate

    return add

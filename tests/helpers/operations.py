"""The operations of torch that a block calls, by torch's profiler: under a dispatch mode nothing is observed, so none can count them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.autograd.profiler import profile

HOST_READS = frozenset({"_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select", "_unique", "_unique2"})
"""Operations that wait for the device, because the host reads a value."""


@dataclass
class Operations:
    """What a block called, in the order of the calls."""

    names: list[str] = field(default_factory=list)
    """Names of the operations that no other operation called."""
    inner: list[str] = field(default_factory=list)
    """Names of those that another operation called."""

    def host_reads(self) -> list[str]:
        """Those that read a value on the host."""
        return [name for name in (*self.names, *self.inner) if name in HOST_READS]


@contextmanager
def operations() -> Iterator[Operations]:
    """Record the operations that the block calls; they are known after it."""
    found = Operations()
    with profile() as recorded:
        yield found
    for event in recorded.function_events or ():
        namespace, _, name = event.name.rpartition("::")
        if namespace == "aten":
            parent = event.cpu_parent
            while parent is not None and not parent.name.startswith("aten::"):
                parent = parent.cpu_parent
            (found.names if parent is None else found.inner).append(name)


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Fail if the block reads a value on the host."""
    with operations() as called:
        yield
    reads = called.host_reads()
    assert not reads, f"{', '.join(reads)}: the host reads a value"

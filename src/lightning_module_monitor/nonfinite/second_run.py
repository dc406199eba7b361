"""Runs a micro-batch of a step again, on a copy of the model that shares its weights, to find its first non-finite value."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from lightning_module_monitor.distributed.shards import local_part
from lightning_module_monitor.kernels.elements import in_memory
from lightning_module_monitor.lightning_packages import LightningModule
from lightning_module_monitor.model.compiled import OriginalCode
from lightning_module_monitor.model.copies import independent_copy
from lightning_module_monitor.model.names import ROOT, ModuleSite
from lightning_module_monitor.model.outputs import is_known, map_leaves, named_tensors, suffix
from lightning_module_monitor.model.unchanged import RandomStates, unchanged_random_states
from lightning_module_monitor.nonfinite.magnitudes import Magnitudes, has_fractions
from lightning_module_monitor.nonfinite.masked_rows import MaskedRows
from lightning_module_monitor.nonfinite.probe import NonfiniteProbe, ObservedPasses
from lightning_module_monitor.nonfinite.producer import Producer, kind_of, producer
from lightning_module_monitor.silent_copy import run_training_step, silence

MAX_EARLIER_BYTES = 2**28
"""Limit of the memory of earlier batches of a step, which Lightning would have released: 256 MiB."""


class _Kept:
    """A micro-batch that can be run again: its number, its batch, as ``training_step`` is about to get it, and the random states.

    The batch's containers are copied, and the versions of its tensors noted.
    """

    def __init__(self, number: int, batch: object, batch_idx: int, random_states: RandomStates) -> None:
        self.number = number
        self.batch = map_leaves(batch, lambda leaf: leaf, keeps_mappings=True)
        self.batch_idx, self.random_states = batch_idx, random_states
        self._tensors = [*named_tensors(self.batch)]
        self._versions = _versions(self._tensors)

    @cached_property
    def memory(self) -> Mapping[int, int]:
        """The storages of its tensors: bytes by address."""
        return dict(_memory(tensor) for _path, tensor in self._tensors)

    def was_written_to(self) -> bool:
        """Whether its tensors, or containers that cannot be copied, were written to."""
        return _versions(named_tensors(self.batch)) != self._versions


class SecondRun:
    """Keeps the batches of one step, up to a limit, and the random states before each, to run one of them again before the update.

    The second run, in which ``sites`` are observed, shares the ``weights`` unless the forward pass writes into them. Without weights the
    step is kept lightly, i.e. of the random states torch's alone. That takes a tenth of the time and mostly reproduces the step; the
    second run then uses copies of all weights.
    """

    def __init__(
        self, model: LightningModule, sites: Sequence[ModuleSite], weights: Sequence[nn.Parameter] | None, *, is_scaled: bool = False
    ) -> None:
        self._model, self._sites, self._is_scaled = model, sites, is_scaled
        self._is_whole = weights is not None
        self._versions = [(weight, weight._version) for weight in weights or ()]
        """The weights with their versions before the step, whose forward pass may write into some."""
        self._kept: list[_Kept | None] = []
        """By micro-batch; ``None`` if it was released."""

    def keep(self, batch: object, batch_idx: int) -> None:
        """A micro-batch is about to be run."""
        random_states = RandomStates(self._model.device, torch_only=not self._is_whole)
        self._kept.append(_Kept(len(self._kept), batch, batch_idx, random_states))
        if len(self._kept) > 1:
            self._make_room()

    def _make_room(self) -> None:
        """Release the newest batches, except the running one, until the others are within the limit."""
        *earlier, running = self._kept
        assert running is not None
        for number in reversed(range(len(earlier))):
            storages = {address: size for kept in earlier if kept is not None for address, size in kept.memory.items()}
            if sum(size for address, size in storages.items() if address not in running.memory) <= MAX_EARLIER_BYTES:
                return
            self._kept[number] = earlier[number] = None

    def prepare(self, micro_batch: int, error: Exception | None = None) -> Callable[[], Producer | None]:
        """Copy the model, to run the first micro-batch with a non-finite value again and observe its modules.

        If its batch was released, the next kept micro-batch is run, as non-finite values often persist. Overflow in the backward pass
        of a scaled loss is left to the scaler. If the step was ended by an ``error``, such an error may end the second run, too.

        Returns:
            A function that runs it. It returns the module that made the first non-finite value, or the reason why it is not known;
            ``None`` if all was finite this time.

        Raises:
            Exception: Whatever the copy of an attribute raises.
        """
        kept = next((kept for kept in self._kept[micro_batch:] if kept is not None), None)
        if kept is None:
            raise RuntimeError(f"no batch was kept from micro-batch {micro_batch} on")
        if error is not None:
            self._versions.clear()  # what comes after the error has not run yet, and may write into any weight
        return functools.partial(self._find, micro_batch, kept, *self._sibling(), error)

    def _find(
        self, micro_batch: int, kept: _Kept, sibling: LightningModule, sites: Sequence[ModuleSite], error: Exception | None
    ) -> Producer | None:
        """Run a kept micro-batch, ``micro_batch`` or a later one, on a sibling in which ``sites`` are observed."""
        number, obstacle = kept.number, ""
        if number != micro_batch:
            obstacle = f"its batch was not kept, as those before it hold {MAX_EARLIER_BYTES // 2**20} MiB, or would with it"
        elif kept.was_written_to():
            obstacle = "its batch was written into in the step, and cannot be run again as it was"
        masked_rows = MaskedRows()
        with masked_rows:
            source = producer(self._observed(kept, sibling, sites, error))
        if source is not None and masked_rows.is_found and source.value == "NaN":
            words = f"{source.words} There, attention or a softmax has a row in which all keys are masked."
            source = replace(source, words=words, cause="masked_row")
        if source is not None and source.site == ROOT and source.is_forward:
            source = _with_batch(source, kept.batch)
        if not obstacle:
            return None if source is None else replace(source, micro_batch=number)
        prefix = "Run again on the batch as it is now" if number == micro_batch else f"In micro-batch {number}, run again instead"
        words = f"{obstacle}. {prefix}, {'all was finite.' if source is None else f'it was in {source.location}: {source.words}'}"
        is_own = number == micro_batch and source is not None and source.cause == "data"  # the step wrote into the data
        # If two ranks have the same micro-batch, the rank that knows the module comes first.
        return Producer(ROOT, False, micro_batch, sys.maxsize, words, cause="" if source is None or is_own else source.cause)

    def _observed(
        self, kept: _Kept, sibling: LightningModule, sites: Sequence[ModuleSite], error: Exception | None
    ) -> ObservedPasses | None:
        """Run a micro-batch again with the probe, and return what it observed, up to an error; ``None`` if all is finite."""
        probe = NonfiniteProbe(sites, _raise)
        probe.attach()
        was_cut_short = error is not None
        try:
            probe.begin_micro_batch()
            with _kept_gradients(self._model), suppress(*(() if error is None else (type(error),))):
                loss = self._run(sibling, kept)
                if loss is not None:
                    probe.begin_backward(loss)
                    if loss.requires_grad and not self._is_scaled:
                        loss.backward()
                was_cut_short = False
            probe.end_micro_batch()
            return probe.observed(was_cut_short=was_cut_short)
        finally:
            probe.close()

    def _sibling(self) -> tuple[LightningModule, list[ModuleSite]]:
        """A copy of the model, and the same sites in it.

        It shares the memory of the weights, except of weights that the step's forward pass may have written into.
        """
        model = self._model
        for tensor in (*model.parameters(), *model.buffers()):
            in_memory(tensor)
        unwritten = {id(weight) for weight, version in self._versions if weight._version == version}
        shared: dict[int, Any] = {}
        for weight in model.parameters():
            is_plain = type(weight) is nn.Parameter
            # A subclass of Parameter may have further attributes, and is copied; a parameter of a tensor's class (DTensor) has none.
            if id(weight) in unwritten and (is_plain or not issubclass(type(weight), nn.Parameter)):
                shared[id(weight)] = (_SharedWeight if is_plain else nn.Parameter)(weight.detach(), weight.requires_grad)
        sibling = cast(LightningModule, independent_copy(model, shared))
        silence(sibling)
        for copied in sibling.parameters():
            if copied.requires_grad and copied.is_leaf:
                copied.register_post_accumulate_grad_hook(_release_gradient)
        counterparts = dict(zip(model.modules(), sibling.modules(), strict=True))
        return sibling, [ModuleSite(site.name, site.aliases, counterparts[site.module]) for site in self._sites]

    def _run(self, sibling: LightningModule, kept: _Kept) -> Tensor | None:
        with unchanged_random_states(self._model.device), OriginalCode():
            kept.random_states.restore()
            output = run_training_step(sibling, self._model.trainer, kept.batch, kept.batch_idx)
        loss = output.get("loss") if isinstance(output, dict) else output
        return loss if isinstance(loss, Tensor) else None


@contextmanager
def _kept_gradients(model: nn.Module) -> Iterator[None]:
    """Put the gradients of a model's weights away: code of a copy may reach these by other names than those of its attributes."""
    gradients = [(weight, weight.grad) for weight in model.parameters()]
    for weight, _gradient in gradients:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in gradients:
            weight.grad = gradient


class _SharedWeight(nn.Parameter):
    """A weight that shares memory with the model's. In-place operations raise its version; ``data`` has no version, and is a copy."""

    @property
    def data(self) -> Tensor:
        return self.detach().clone()

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # torch's own descriptor


def _with_batch(source: Producer, batch: object) -> Producer:
    """The source of a value that a module was given, or that the LightningModule's own code made, after a look at the batch."""
    content = _nonfinite_content(batch)
    if content:
        return replace(source, words=f"{source.words} The batch has {content}.", cause="data", location="the batch")
    if is_known(batch):
        return replace(source, words=f"{source.words} The batch is finite.", location="training_step")
    return replace(source, words=f"{source.words} The batch holds objects that cannot be looked into.")


def _release_gradient(weight: Tensor) -> None:
    weight.grad = None


def _raise(error: Exception) -> NoReturn:
    raise error


def _versions(tensors: Iterable[tuple[object, Tensor]]) -> list[tuple[object, int, int]]:
    """The versions of a batch's tensors, which every write raises. A model that trains cannot write to tensors of inference mode."""
    return [(path, id(tensor), 0 if tensor.is_inference() else tensor._version) for path, tensor in tensors]


def _nonfinite_content(batch: object) -> str:
    """The kinds of non-finite values in a batch, and the samples that have them, in words; empty if it is finite.

    A sample is an index in the first dimension, where all tensors have the same length; else it is a row of one tensor.
    """
    tensors = [(path, local_part(tensor)) for path, tensor in named_tensors(batch)]
    lengths = {len(tensor) for _path, tensor in tensors if tensor.dim()}
    tensors = [(path, tensor) for path, tensor in tensors if has_fractions(tensor)]
    numbers = Magnitudes()
    for _path, tensor in tensors:
        numbers.add(tensor)
    kinds = sorted({kind_of(value) for value in numbers.read() if not math.isfinite(value)})
    if not kinds:
        return ""
    for path, tensor in tensors:
        rows = (~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist() if tensor.dim() and tensor.numel() else []
        if rows:
            what, of = ("sample", "") if len(lengths) == 1 else ("row", f" of {suffix(path, 'batch')}")
            more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
            return f"{' and '.join(kinds)}, in {what} {', '.join(map(str, rows[:3]))}{more}{of}"
    return " and ".join(kinds)


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's storage, and its size in bytes."""
    if tensor.layout is not torch.strided:
        return id(tensor), tensor.numel() * tensor.element_size()  # an upper bound: a sparse tensor leaves out zeros
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()

"""Runs a micro-batch of a step again, on a copy of the model that shares its weights, to find the first non-finite value in it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_module_monitor.distributed.shards import local_part
from lightning_module_monitor.health.producer import Producer, kind_of, producer
from lightning_module_monitor.kernels.elements import in_memory
from lightning_module_monitor.lightning_packages import LightningModule
from lightning_module_monitor.model.compiled import Uncompiled
from lightning_module_monitor.model.copies import independent_copy
from lightning_module_monitor.model.names import ROOT, ModuleSite
from lightning_module_monitor.model.outputs import named_tensors, with_tensors
from lightning_module_monitor.model.unchanged import RandomStates, unchanged_random_states
from lightning_module_monitor.probes.masked_rows import MaskedRows
from lightning_module_monitor.probes.nonfinite import NonfiniteProbe, Observed
from lightning_module_monitor.statistics.magnitudes import Magnitudes
from lightning_module_monitor.trainer.silent_copy import run_training_step, silence
from lightning_module_monitor.trainer.strategy import scaler_of

MAX_EARLIER_BYTES = 2**28
"""Limit of the memory of earlier micro-batches' batches, which Lightning would have released, beside the running one's: 256 MiB."""


class _Kept:
    """The data to run a micro-batch again: its batch, as ``training_step`` is about to get it, its number, and the random states.

    With ``is_whole`` the containers of the batch are copied, and the versions of its tensors noted.
    """

    def __init__(self, batch: object, batch_idx: int, random_states: RandomStates, *, is_whole: bool) -> None:
        self.batch = with_tensors(batch, lambda tensor: tensor) if is_whole else batch
        self.batch_idx, self.random_states = batch_idx, random_states
        self._versions = _versions(self.batch) if is_whole else None

    @cached_property
    def memory(self) -> Mapping[int, int]:
        """The storages of its tensors: bytes by address."""
        return dict(_memory(tensor) for _path, tensor in named_tensors(self.batch))

    def was_written_to(self) -> bool:
        """Whether its tensors, or what holds them and cannot be copied, were written to."""
        return self._versions is not None and _versions(self.batch) != self._versions


class StepRerun:
    """Keeps the batches of a step, up to a limit, and the random states before each, to run one again before the update."""

    def __init__(self, model: LightningModule, sites: Sequence[ModuleSite]) -> None:
        self._model, self._sites = model, sites
        self._kept: list[_Kept | None] = []
        """By micro-batch; ``None`` where there was no room."""
        self._weights: list[nn.Parameter] = []
        """The weights of the model when the first step began."""
        self._versions: list[int] = []
        """The version of each weight before a step that is kept as a whole, whose forward pass may write into some; else empty."""

    def keep(self, batch: object, batch_idx: int, *, is_first: bool, is_whole: bool) -> None:
        """A micro-batch is about to be run.

        With ``is_whole`` everything that the step depends on is kept. Else torch's random states alone are kept, and the batch as it is,
        which takes a tenth of the time and mostly shows the same; the step is run again on copies of all weights.
        """
        if is_first:
            self.forget()
            if is_whole:
                self._weights = self._weights or [
                    one for one in self._model.parameters() if not (nn.parameter.is_lazy(one) or one.is_inference())
                ]
            self._versions = [one._version for one in self._weights] if is_whole else []
        random_states = RandomStates.now(self._model.device, torch_only=not is_whole)
        self._kept.append(_Kept(batch, batch_idx, random_states, is_whole=is_whole))
        if len(self._kept) > 1:
            self._make_room()

    def _make_room(self) -> None:
        """Release the newest batches, but for the running one, until the rest holds no more than it may."""
        *earlier, running = self._kept
        assert running is not None
        for number in reversed(range(len(earlier))):
            beside = {address: size for one in earlier if one is not None for address, size in one.memory.items()}
            if sum(size for address, size in beside.items() if address not in running.memory) <= MAX_EARLIER_BYTES:
                return
            self._kept[number] = earlier[number] = None

    def forget(self) -> None:
        """The step is over."""
        self._kept.clear()

    def look(self, micro_batch: int) -> Producer | None:
        """Run the first micro-batch with a non-finite value again, and observe its modules.

        If its batch was not kept, the next one that was is run, as non-finite values often persist. Overflow in the backward pass of a
        scaled loss is left to the scaler.

        Returns:
            The module that made the first non-finite value, or why it is not known; ``None`` if all was finite this time.
        """
        number, kept = next((number, one) for number, one in enumerate(self._kept) if number >= micro_batch and one is not None)
        obstacle = ""
        if number != micro_batch:
            obstacle = f"its batch was not kept, as those before it hold {MAX_EARLIER_BYTES // 2**20} MiB, or would with it"
        elif kept.was_written_to():
            obstacle = "its batch was written into in the step, and cannot be run again as it was"
        masked_rows = MaskedRows()
        with masked_rows:
            found = producer(self._observed(kept))
        if found is not None and masked_rows.is_found and found.value == "NaN":
            words = f"{found.words} There, attention or a softmax has a row in which all keys are masked."
            found = replace(found, words=words, cause="masked_row")
        if found is not None and found.site == ROOT and found.is_forward:
            kinds = _nonfinite_in(kept.batch)
            batch = f"The batch has {' and '.join(kinds)}{_samples_in(kept.batch)}." if kinds else "The batch is finite."
            place, cause = ("the batch", "data") if kinds else ("training_step", found.cause)
            found = replace(found, words=f"{found.words} {batch}", cause=cause, place_in_words=place)
        if not obstacle:
            return None if found is None else replace(found, micro_batch=number)
        how = "Run again on the batch as it is now" if number == micro_batch else f"In micro-batch {number}, run again instead"
        words = f"{obstacle}. {how}, {'all was finite.' if found is None else f'it was in {found.place_in_words}: {found.words}'}"
        # If two ranks have the same micro-batch, the one that knows the module comes first.
        return Producer(ROOT, False, micro_batch, sys.maxsize, words, is_known=False, cause="" if found is None else found.cause)

    def _observed(self, kept: _Kept) -> Observed | None:
        """The probe's observation of a second run of a micro-batch; ``None`` if all is finite."""
        sibling, same_sites = self._sibling()
        probe = NonfiniteProbe(same_sites)
        probe.attach()
        try:
            probe.begin_micro_batch()
            loss = self._run(sibling, kept)
            if loss is not None:
                probe.begin_backward(loss)
                if loss.requires_grad and scaler_of(self._model.trainer) is None:
                    loss.backward()
            probe.end_micro_batch()
            return probe.observed()
        finally:
            probe.close()

    def _sibling(self) -> tuple[LightningModule, list[ModuleSite]]:
        """A copy of the model, and the same sites in it.

        Its weights have the same memory; those that the step's forward pass may have written into are copies.
        """
        model = self._model
        for tensor in (*model.parameters(), *model.buffers()):
            in_memory(tensor)
        unwritten = {id(one) for one, version in zip(self._weights, self._versions, strict=False) if one._version == version}
        shared: dict[int, Any] = {}
        for one in model.parameters():
            is_plain = type(one) is nn.Parameter
            # A subclass of Parameter has attributes of its own, and is copied; a parameter of a tensor's class (DTensor) has none.
            if id(one) in unwritten and (is_plain or not issubclass(type(one), nn.Parameter)):
                shared[id(one)] = (_SharedWeight if is_plain else nn.Parameter)(one.detach(), one.requires_grad)
        sibling = cast(LightningModule, independent_copy(model, shared))
        silence(sibling)
        for weight in sibling.parameters():
            if weight.requires_grad and weight.is_leaf:
                weight.register_post_accumulate_grad_hook(_release_gradient)
        same = dict(zip(model.modules(), sibling.modules(), strict=True))
        return sibling, [ModuleSite(site.name, site.aliases, same[site.module]) for site in self._sites]

    def _run(self, sibling: LightningModule, kept: _Kept) -> Tensor | None:
        """Run a micro-batch uncompiled; returns its loss."""
        with unchanged_random_states(self._model.device), Uncompiled():
            kept.random_states.restore()
            output = run_training_step(sibling, self._model.trainer, kept.batch, kept.batch_idx)
        loss = output.get("loss") if isinstance(output, dict) else output
        return loss if isinstance(loss, Tensor) else None


class _SharedWeight(nn.Parameter):
    """A weight in the memory of the model's. Operations that write into it raise its version; ``data`` has none, and gives a copy."""

    @property
    def data(self) -> Tensor:
        return self.detach().clone()

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # torch's own descriptor


def _release_gradient(weight: Tensor) -> None:
    weight.grad = None


def _versions(batch: object) -> list[tuple[object, int, int]]:
    """The versions of a batch's tensors, which every write raises. One of inference mode cannot be written to while a model trains."""
    return [(path, id(tensor), 0 if tensor.is_inference() else tensor._version) for path, tensor in named_tensors(batch)]


def _nonfinite_in(batch: object) -> list[str]:
    """The kinds of non-finite values in a batch: then it is the cause, and not the LightningModule's own code."""
    numbers = Magnitudes()
    for _path, tensor in named_tensors(batch):
        if tensor.is_floating_point() or tensor.is_complex():
            numbers.add(local_part(tensor))
    return sorted({kind_of(value) for value in numbers.read() if not math.isfinite(value)})


def _samples_in(batch: object) -> str:
    """The samples of a batch that are not finite, in words: by their index in the first dimension of the largest such tensor."""
    bad = [local_part(one) for _path, one in named_tensors(batch) if one.dim() and (one.is_floating_point() or one.is_complex())]
    rows = [(~one.isfinite()).flatten(1).any(1) if one.dim() > 1 else ~one.isfinite() for one in bad]
    samples = next((found for row in rows if (found := row.nonzero().flatten().tolist())), [])
    more = f" and {len(samples) - 3} more" if len(samples) > 3 else ""
    return f", in sample {', '.join(map(str, samples[:3]))}{more}" if samples else ""


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies, and how many bytes there are."""
    if tensor.layout is not torch.strided:
        return id(tensor), tensor.numel() * tensor.element_size()  # at most: a sparse tensor leaves out zeros
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()

"""A step, run again by a copy of the model: who made the first value that is not finite in it, and what it was called with."""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_module_monitor.distributed.shards import local_part
from lightning_module_monitor.health.producer import Producer, kind_of, producer
from lightning_module_monitor.health.snapshot import Snapshot
from lightning_module_monitor.kernels.elements import in_memory
from lightning_module_monitor.model.copies import copies_without_graph
from lightning_module_monitor.model.hooks import UncopiedHook
from lightning_module_monitor.model.names import ROOT, ModuleSite
from lightning_module_monitor.model.outputs import copied, named_tensors
from lightning_module_monitor.model.random_states import RandomStates, unchanged_random_states
from lightning_module_monitor.probes.nonfinite import NonfiniteProbe, Seen
from lightning_module_monitor.statistics.magnitudes import Magnitudes
from lightning_module_monitor.trainer.training_reference import run_training_step, silence

MAX_EARLIER_BYTES = 2**28
"""What the batches of micro-batches that are over may hold until the step is, beside that of the one that is running: 256 MiB. Lightning
would have let them go."""


class _Kept:
    """What a micro-batch is run again with.

    Args:
        batch: As its ``training_step`` is about to get it. What that puts into it, or takes out, changes nothing of what is kept.
        batch_idx: Its number.
        random_states: As they are before it.
    """

    def __init__(self, batch: object, batch_idx: int, random_states: RandomStates) -> None:
        self.batch = copied(batch, {id(tensor): tensor for _path, tensor in named_tensors(batch)})
        self.batch_idx, self.random_states = batch_idx, random_states
        self._versions = _versions(self.batch)

    @cached_property
    def memory(self) -> Mapping[int, int]:
        """What its tensors lie in: bytes by address. They may be parts of more."""
        return dict(_memory(tensor) for _path, tensor in named_tensors(self.batch))

    def was_written_to(self) -> bool:
        """Whether anybody has written into its tensors, or into what holds them and cannot be copied."""
        return _versions(self.batch) != self._versions


@dataclass
class _Call:
    """A call of a module, as it was made."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_states: RandomStates
    autocast: torch.dtype | None


class StepAgain:
    """Keeps the batches of a step, as far as there is room, and the random states before each.

    A copy of the model is only made when a step is to be run again: before its optimizer has moved the weights.
    """

    def __init__(self) -> None:
        self._kept: list[_Kept | None] = []
        """By micro-batch; ``None`` where there was no room."""

    def keep(self, pl_module: LightningModule, batch: object, batch_idx: int, *, is_first: bool) -> None:
        """A micro-batch is about to be run, the first one of a step, or another."""
        if is_first:
            self.forget()
        self._kept.append(_Kept(batch, batch_idx, RandomStates.now(pl_module.device)))
        self._make_room()

    def _make_room(self) -> None:
        """Let go of those that came last, but for the one that is running, until what is held beside that is no more than it may be."""
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

    def look(
        self, trainer: Trainer, pl_module: LightningModule, sites: list[ModuleSite], micro_batch: int, *, is_scaled: bool
    ) -> Producer | None:
        """Run a micro-batch again, and look at all of it.

        Args:
            trainer: The run's.
            pl_module: The model.
            sites: Its modules that are watched.
            micro_batch: The first one that had what is not finite. Where its batch was not kept, the next one that was is run, for what
                is not finite often stays.
            is_scaled: Whether the loss is: what overflows in the backward pass is seen to by who scales it.

        Returns:
            Who made the first value that is not finite, or why that cannot be known; ``None`` if all was finite this time.
        """
        number, kept = next((number, one) for number, one in enumerate(self._kept) if number >= micro_batch and one is not None)
        obstacle = ""
        if number != micro_batch:
            obstacle = f"its batch was not kept, as those before it hold {MAX_EARLIER_BYTES // 2**20} MiB, or would with it"
        elif kept.was_written_to():
            obstacle = "its batch was written into in the step, and cannot be run again as it was"
        seen = self._seen(trainer, pl_module, sites, kept, is_scaled=is_scaled)
        found = None if seen is None else producer(seen)
        if found is not None and found.site == ROOT and found.is_forward:
            found = replace(found, words=f"{found.words} {_in_words(kept.batch)}")
        if not obstacle:
            return None if found is None else replace(found, micro_batch=number)
        how = "Run again on the batch as it is now" if number == micro_batch else f"In micro-batch {number}, run again instead"
        words = f"{obstacle}. {how}, {'all was finite.' if found is None else f'it was {found.site}: {found.words}'}"
        # Of two ranks that saw it in the same micro-batch, one that knows more comes first.
        return Producer(ROOT, False, micro_batch, sys.maxsize, words, is_known=False)

    def _seen(self, trainer: Trainer, pl_module: LightningModule, sites: list[ModuleSite], kept: _Kept, *, is_scaled: bool) -> Seen | None:
        """What is seen when a micro-batch is run again; ``None`` if all is finite."""
        twin = _twin(pl_module)
        probe = NonfiniteProbe(_same_sites(pl_module, twin, sites), _raise)
        probe.attach()
        try:
            probe.begin_micro_batch()
            loss = self._run(trainer, pl_module, twin, kept)
            if loss is not None:
                probe.begin_backward(loss)
                if loss.requires_grad and not is_scaled:
                    loss.backward()
            probe.end_micro_batch()
            return probe.seen()
        finally:
            probe.close()

    def snapshot(self, trainer: Trainer, pl_module: LightningModule, found: Producer, step: int, *, site: ModuleSite | None) -> Snapshot:
        """The call in which a module made what is not finite, and all that it takes to make it again.

        Args:
            trainer: The run's.
            pl_module: The model.
            found: Who it was.
            step: When.
            site: The module, if it was one.

        Raises:
            RuntimeError: If the batch was not kept.
        """
        kept = self._kept[found.micro_batch]  # of one that is not known the last
        if kept is None:
            raise RuntimeError(f"the batch of micro-batch {found.micro_batch} was not kept")
        call = None if site is None else self._called_again(trainer, pl_module, found, kept, site)
        return Snapshot(
            step=step,
            site=found.site,
            words=found.words,
            is_forward=found.is_forward,
            batch=kept.batch,
            batch_random_states=kept.random_states,
            module=None if call is None else call.module,
            args=() if call is None else call.args,
            kwargs={} if call is None else call.kwargs,
            random_states=None if call is None else call.random_states,
            autocast=None if call is None else call.autocast,
        )

    def _called_again(self, trainer: Trainer, pl_module: LightningModule, found: Producer, kept: _Kept, site: ModuleSite) -> _Call | None:
        """The call that was meant; ``None`` if it does not come."""
        twin = _twin(pl_module)
        [same] = _same_sites(pl_module, twin, [site])
        calls: list[_Call] = []
        countdown = itertools.count(-found.call)

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if next(countdown) == 0:
                device = pl_module.device
                dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
                memo: dict[int, Tensor] = {}
                calls.append(_Call(_plain_copy(module), copied(args, memo), copied(kwargs, memo), RandomStates.now(device), dtype))

        same.module.register_forward_pre_hook(UncopiedHook(keep), with_kwargs=True)
        with torch.no_grad():
            self._run(trainer, pl_module, twin, kept)
        return calls[0] if calls else None

    @staticmethod
    def _run(trainer: Trainer, pl_module: LightningModule, twin: LightningModule, kept: _Kept) -> Tensor | None:
        """Run a micro-batch; returns its loss."""
        with unchanged_random_states(pl_module.device):
            kept.random_states.restore()
            output = run_training_step(twin, trainer, kept.batch, kept.batch_idx)
        loss = output.get("loss") if isinstance(output, dict) else output
        return loss if isinstance(loss, Tensor) else None


def site_of(sites: list[ModuleSite], found: Producer) -> ModuleSite | None:
    """The module that made it; ``None`` if it was the LightningModule's own code, or the batch."""
    return None if found.site == ROOT else next(site for site in sites if site.name == found.site)


def _versions(batch: object) -> list[tuple[object, int, int]]:
    """What changes with every write into a tensor of a batch. Into one of inference mode nobody can write while a model trains."""
    return [(path, id(tensor), 0 if tensor.is_inference() else tensor._version) for path, tensor in named_tensors(batch)]


def _in_words(batch: object) -> str:
    """Whether a batch is finite: where nobody but it and the LightningModule's own code can be accused, it tells which of them."""
    numbers = Magnitudes()
    for _path, tensor in named_tensors(batch):
        if tensor.is_floating_point() or tensor.is_complex():
            numbers.add(local_part(tensor))
    kinds = sorted({kind_of(value) for value in numbers.read() if not math.isfinite(value)})
    return f"The batch has {' and '.join(kinds)}." if kinds else "The batch is finite."


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies, and how many bytes there are."""
    if tensor.layout is not torch.strided:
        return id(tensor), tensor.numel() * tensor.element_size()  # at most: what is left out of it is zero
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _twin(pl_module: LightningModule) -> LightningModule:
    known = copies_without_graph(pl_module)
    for tensor in (*pl_module.parameters(), *pl_module.buffers()):
        in_memory(tensor)
    twin = copy.deepcopy(pl_module, known)
    shared = set(pl_module.modules()) & set(twin.modules())
    if shared:
        raise RuntimeError(f"a copy of {type(pl_module).__name__} shares its {type(shared.pop()).__name__} with it")
    silence(twin)
    return twin


def _same_sites(pl_module: LightningModule, twin: LightningModule, sites: list[ModuleSite]) -> list[ModuleSite]:
    """Sites of a copy, under the same names."""
    same = dict(zip(pl_module.modules(), twin.modules(), strict=True))
    return [ModuleSite(site.name, site.aliases, same[site.module]) for site in sites]


def _plain_copy(module: nn.Module) -> nn.Module:
    """A copy without hooks: ours do nothing in a copy, and those of others may not be fit for a file."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
    return twin


def _raise(error: Exception) -> None:
    raise error

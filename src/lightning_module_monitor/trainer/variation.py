"""How much the output of a model, its input and its targets differ between the samples of a batch."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_module_monitor.health.facts import CallFacts
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.model.hooks import HookSet, UncopiedHook, is_in_backward
from lightning_module_monitor.model.names import ROOT
from lightning_module_monitor.model.outputs import named_tensors
from lightning_module_monitor.probes.tap import counted_elements
from lightning_module_monitor.step.accumulator import StepAccumulator
from lightning_module_monitor.trainer.call_shapes import mixes_samples, normalizes_two_values
from lightning_module_monitor.trainer.run import Run

UNITS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Classes of layers whose units have weights of their own."""
OF_FIRST = ("constant_from", "same_units")
"""Names of the numbers of the first step."""
MAX_ELEMENTS = 2**20
"""Number of elements of a tensor that are looked at; of a larger one evenly spaced features."""
MAX_TENSORS = 4
"""Number of tensors of an output that are looked at: some modules return those of each layer."""
CONSTANT = 1e-6
"""A variation below this is rounding."""
VARYING = 1e-3
"""A variation above this is none of rounding: below it, what follows has lost it little by little."""


def variation(tensor: Tensor, dimension: int) -> Tensor:
    """How much samples differ from the first one: the norm of their differences from it, over the norm of all elements.

    If samples are independent, it is about 1.4 times the standard deviation over samples relative to the root mean square.

    Args:
        tensor: Any shape and real dtype; a large one is represented by some of its features.
        dimension: That of the samples.

    Returns:
        Shape ``()``, at least float32; 0 if all samples are equal, NaN if an element is not finite.
    """
    if tensor.numel() > MAX_ELEMENTS:
        samples = tensor.movedim(dimension, 0).flatten(1) if tensor.dim() > 1 else tensor[:, None]
        tensor, dimension = samples[:, :: -(-samples.numel() // MAX_ELEMENTS)], 0
    tensor = tensor if tensor.is_floating_point() else tensor.float()
    wide = torch.promote_types(tensor.dtype, torch.float32)
    difference, size = (torch.linalg.vector_norm(part, dtype=wide) for part in (tensor - tensor.narrow(dimension, 0, 1), tensor))
    relative: Tensor = difference / size.clamp_min(torch.finfo(wide).tiny)
    return relative


def sample_dimension(tensor: Tensor, num_samples: int) -> int | None:
    """The first dimension whose length is that of the batch; ``None`` without one, and for batches of one sample."""
    lengths = [*tensor.shape]
    return lengths.index(num_samples) if num_samples > 1 and num_samples in lengths and tensor.layout is torch.strided else None


class OutputVariation:
    """Takes the variation of the model's output in monitored steps: that of the module that returns last.

    The first step takes that of every module, to find which one is last, and from which one on outputs are constant. What is taken is the
    largest of a step's calls and micro-batches, without those of a single sample, and of the tensors of an output: which one of these
    the loss uses is not known.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._hooks = HookSet()
        self._step: StepAccumulator | None = None
        """The accumulator of the open step."""
        self._is_first = True
        """Whether no step has ended."""
        self._num_samples, self._has_samples_first = 0, False
        self._variations: dict[str, Tensor] = {}
        """By module, in the order of the last calls."""
        self._gradient_modes: defaultdict[str, set[bool]] = defaultdict(set)
        """Whether gradients were enabled in the calls of a module with parameters in the first step: with, without, or both."""
        self._mixing: dict[str, None] = {}
        """Modules that mixed samples in the first step, in the order of their calls."""
        self._of_two_values: dict[str, None] = {}
        """Modules that normalized two values in the first step."""
        self._of_units: dict[str, Tensor] = {}
        """Variation between the units of a layer in the first step, by module; NaN if samples do not differ."""
        self._of_first: dict[str, Tensor | float] = {}
        """``constant_from`` and ``same_units``: numbers of the first step, which each record has."""

    @property
    def calls(self) -> CallFacts:
        """Facts about the calls of modules, which a checkpoint has."""
        return self._run.results.calls

    def begin_step(self) -> None:
        """A monitored step begins."""
        self.close()
        if self._is_first and self.calls.order:  # the run is resumed
            first, self._is_first = self._run.results.history.first, False
            self._of_first = {name: first[name] for name in OF_FIRST if name in first}
        context = self._run.engine.open_step
        self._step = None if context is None else context.accumulator
        for site in self._run.planner.index.modules:
            if site.name != ROOT if self._is_first else site.name == self.calls.output:
                self._hooks.add_forward(site.module, UncopiedHook(functools.partial(self._observe, site.name)))

    def begin_batch(self, num_samples: int | None, tensors: Sequence[Tensor]) -> None:
        """A micro-batch begins, with such tensors."""
        self._num_samples = num_samples or 0
        # A number for each sample; without one the first dimension may be that of a sequence.
        self._has_samples_first = any(tensor.shape == (self._num_samples,) for tensor in tensors)

    def _observe(self, name: str, called: nn.Module, args: Sequence[object], output: object) -> None:
        """A module has returned: take the tensors of its output that have the samples of the batch."""
        step, has_gradient = self._step, torch.is_grad_enabled()
        if step is None or self._run.engine.gate.observer_of_calls is not step or is_in_backward():
            return
        with self._run.reporter.guard("variation of the output", step):
            num_taken = 0
            for _path, tensor in named_tensors(output):
                whole = plain(tensor)
                dimension = sample_dimension(whole, self._num_samples) if whole.is_floating_point() else None
                if dimension is not None and len(elements := counted_elements(whole.detach())) and elements.shape == whole.shape:
                    self._take(name, called, elements, dimension)
                    num_taken += 1
                    if num_taken == MAX_TENSORS:
                        break
            if self._is_first:
                self._note_call(name, called, args, has_gradient=has_gradient)
            elif not (has_gradient or self.calls.without_gradient):
                self._run.results.calls = self.calls._replace(without_gradient=True)

    def _take(self, name: str, called: nn.Module, elements: Tensor, dimension: int) -> None:
        """Take the variation of a module's output and, in the first step, that between the units of a layer."""
        value, before = variation(elements, dimension), self._variations.pop(name, None)
        self._variations[name] = value if before is None else torch.maximum(value, before.to(value.device))
        if self._is_first and isinstance(called, UNITS) and (unit := _unit_dimension(elements)) is not None:
            # Without biases, which may differ; layers that begin with zeros do not vary at all.
            differences = elements - elements.narrow(dimension, 0, 1)
            self._of_units[name] = torch.where(value > VARYING, variation(differences, unit), torch.nan)

    def _note_call(self, name: str, called: nn.Module, args: Sequence[object], *, has_gradient: bool) -> None:
        """Note what a call in the first step shows."""
        if next(called.parameters(), None) is not None:
            self._gradient_modes[name].add(has_gradient)
        if self._has_samples_first and mixes_samples(called, args, self._num_samples):
            self._mixing[name] = None
        if normalizes_two_values(called, args):
            self._of_two_values[name] = None

    def note_targets(self, num_targets: int) -> None:
        """The loss compares with such a number of labels, 0 if it is not known: a bag of one label has elements, and no samples."""
        if self._num_samples and num_targets % self._num_samples:
            self._mixing.clear()

    def end_step(self) -> dict[str, Tensor | float]:
        """The numbers of the step: ``output_variation``, and those of the first step, ``constant_from`` and ``same_units``.

        The last is the number of layers whose units all return the same. The one before is the index, in the order of execution, of the
        first module from which on all outputs are constant, while the one before it varies; -1 if there is none.
        """
        variations, self._variations = self._variations, {}
        self._hooks.close()
        is_first, self._is_first = self._is_first, False
        if is_first and variations:
            self._read_first(variations)
        value = variations.get(self.calls.output)
        return self._of_first | ({} if value is None else {"output_variation": value})

    def _read_first(self, variations: dict[str, Tensor]) -> None:
        """Read what the calls of the first step show."""
        names = [name for name in variations if not any(other.startswith(f"{name}.") for other in variations)]
        # What a module with others inside returns is not always what the last of these does: a branch may be added that is 0.
        self._run.results.calls = CallFacts(
            tuple(names), self._is_without_gradient(names), tuple(self._mixing), tuple(self._of_two_values), output=[*variations][-1]
        )
        device = variations[names[-1]].device
        values = torch.stack([variations[name].to(device) for name in names])
        positions = torch.arange(1, len(names) + 1, device=device)
        begin = (positions * ~(values < CONSTANT)).amax()
        varies_before = torch.cat([torch.ones_like(values[:1]), values])[begin] > VARYING
        self._of_first = {"constant_from": torch.where(varies_before & (begin < len(names)), begin, -1)}
        if self._of_units:
            of_units = torch.stack([value.to(device) for value in self._of_units.values()])
            self._of_first["same_units"] = (of_units < CONSTANT).sum()
            self._of_units.clear()

    def _is_without_gradient(self, names: Sequence[str]) -> bool:
        """Whether the last of these modules that has parameters ran with gradients and without in the first step."""
        modes = [self._gradient_modes[name] for name in names if name in self._gradient_modes]
        self._gradient_modes.clear()
        return bool(modes) and len(modes[-1]) == 2

    def close(self) -> None:
        """Remove the hooks; a second call does nothing."""
        self._hooks.close()
        self._variations.clear()


def _unit_dimension(output: Tensor) -> int | None:
    """The dimension of the units of a layer's output, as those of ``dead_fraction``; ``None`` for a single unit."""
    dimension = 1 if output.dim() in (4, 5) else output.dim() - 1
    return dimension if output.dim() > 1 and output.shape[dimension] > 1 else None

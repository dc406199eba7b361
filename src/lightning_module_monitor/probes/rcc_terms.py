r"""The refined coordinate check: splits a change into the effects of the weight's change and of the input's change.

For a layer with the weight ``W`` and the input ``x``, and the reference's layer with ``W0`` and ``x0``::

    W x - W0 x0  =  (W - W0) x       +  W0 (x - x0)
                    effective update    propagating update

M. Haas et al., "On the Surprising Effectiveness of Large Learning Rates under Standard Width Scaling", 2025,
arXiv 2505.22491. ``W x`` is the layer's output and ``W0 x0`` the reference's. The function of the layer's type (:mod:`rcc_layers`)
computes ``W0 x`` directly after the layer's forward, before ``x`` can be overwritten. No module is called a second time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_module_monitor.distributed.shards import is_laid_out
from lightning_module_monitor.kernels.moments import Array, Moments, Need
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import RCC_SKIPPED_CALLS
from lightning_module_monitor.model.hooks import HookSet, UncopiedHook, is_in_backward, is_tracing
from lightning_module_monitor.model.outputs import NamedTensors, named_tensors
from lightning_module_monitor.model.unchanged import full_precision
from lightning_module_monitor.probes.base import Probe, StepTools, WatchedModule, failing_alone
from lightning_module_monitor.probes.rcc_layers import (
    ALIGNMENT,
    EFFECTIVE,
    INPUT,
    INPUT_CHANGE,
    OPERATOR_NORM,
    OUTPUT,
    PROPAGATING,
    REFERENCE_OUTPUT,
    LayerType,
    every_vector_once,
    is_plain,
    layer_parts,
    weight_and_bias,
)
from lightning_module_monitor.probes.reference import ReferenceProbe
from lightning_module_monitor.record import NumbersOfStep
from lightning_module_monitor.statistics.functions import Unfinished, Value
from lightning_module_monitor.statistics.precision import Difference
from lightning_module_monitor.statistics.registry import Statistic
from lightning_module_monitor.statistics.spectra import bidiagonals, spectral_norms
from lightning_module_monitor.statistics.stream import BASE, OWN, Stream

_NORM_OF_ALIGNMENT = {"effective": "update", "propagating": "reference"}
"""The operator norm by which each alignment is divided."""

_NO_ALIGNMENT = -1.0
"""The ratio of norms where the input is zero. NaN would stand for non-finite values."""

SKIPPED = (
    "rcc: a call of a layer is skipped if its tensors have other shapes than in the reference or belong to a class that defines "
    "__torch_dispatch__. monitor/rcc_skipped_calls counts such calls."
)


def _ratio_of_norms(moments: Moments, base: Moments) -> Array:
    return np.where(base.squares == 0, _NO_ALIGNMENT, np.sqrt(moments.squares / base.squares))


_RATIO_OF_NORMS = Statistic(Need.SQUARES, _ratio_of_norms, relative=True)

_Observed = tuple[Difference, list[tuple[Stream, int]]]
"""A term, and the rows of moments that it adds to."""


@dataclass(eq=False)
class CheckedLayer:
    """A linear map of a module, and the same map of the reference.

    Attributes:
        type: The type of the layer.
        site: Its name in keys.
        module: The model's module.
        reference: The reference's module.
        streams: The streams of the layer's site, by kind.
        weight_streams: The streams of the weight's site, without the bias, by kind.
        alignments: The streams of the ratio of the norms of term and input, by the name of the alignment.
        norms: The stream of the operator norms that are recorded or that divide alignments; ``None`` if there are none.
    """

    type: LayerType
    site: str
    module: nn.Module
    reference: nn.Module
    streams: dict[str, Stream]
    weight_streams: dict[str, Stream]
    alignments: dict[str, Stream]
    norms: Stream | None


def checked_layers(watched: WatchedModule, reference: nn.Module | None) -> list[CheckedLayer]:
    """The linear maps of a module that the check compares with the reference's module."""
    if not watched.layers or reference is None:
        return []

    def streams_at(site: str) -> dict[str, Stream]:
        return {kind: by_site[site] for kind, by_site in watched.layers.items() if site in by_site}

    layers, module = [], watched.site.module
    parts = layer_parts(module)
    for part, layer_type in parts.items() if layer_parts(reference).keys() == parts.keys() else ():
        site = f"{watched.site.name}.{part}" if part else watched.site.name
        streams, weight_streams = streams_at(site), streams_at(f"{site}.weight")
        planned = streams.get(ALIGNMENT)
        alignments = (
            {} if planned is None else {name: planned.derive(("ratio", name), outputs={name: _RATIO_OF_NORMS}) for name in planned.outputs}
        )
        norms = streams.get(OPERATOR_NORM, planned)
        names = {_NORM_OF_ALIGNMENT[name] for name in alignments}.union(_recorded_norms(streams))
        if norms is not None and norms.outputs.keys() != names:
            outputs = {name: Value() for name in sorted(names)}
            norms = norms.derive(("norms", *outputs), kind=OPERATOR_NORM, outputs=outputs)
        layers.append(CheckedLayer(layer_type, site, module, reference, streams, weight_streams, alignments, norms))
    return layers


def _recorded_norms(streams: Mapping[str, Stream]) -> Collection[str]:
    return streams[OPERATOR_NORM].outputs if OPERATOR_NORM in streams else ()


def intermediate_streams(modules: Sequence[WatchedModule]) -> list[Stream]:
    """The streams from which alignments are computed after the step: ratios of norms, and the operator norms that divide them."""
    layers = [layer for watched in modules for layer in checked_layers(watched, watched.site.module)]
    norms = [layer.norms for layer in layers if layer.norms is not None]
    return [*(stream for layer in layers for stream in layer.alignments.values()), *norms]


class CoordinateCheckProbe(Probe):
    """Observes the terms of the check as the model's modules run. ``skipped_calls`` is the stream of the number of skipped calls."""

    def __init__(self, watched: Sequence[WatchedModule], tools: StepTools, calls: ReferenceProbe, skipped_calls: Stream) -> None:
        self._tools = tools
        self._accumulator = tools.accumulator
        self._calls = calls
        self._reference = calls.reference
        self._skipped_calls = skipped_calls
        self._device = calls.reference.device()
        self._layers = [layer for each in watched for layer in checked_layers(each, self._reference.sibling(each.site.module))]
        self._num_skipped = 0
        self._called = [layer for layer in self._layers if layer.type.is_called]
        self._hooks = HookSet()
        for layer in self._called:
            calls.wanted[layer.reference, layer] = functools.partial(_tensors_to_keep, layer), True

    def attach(self) -> None:
        """Register the hooks, and compute the operator norms of the weights before the step's forward passes."""
        for layer in self._called:
            # Before other hooks, which may replace the output: the terms are those of the layer itself.
            hook = UncopiedHook(functools.partial(self._observe_call, layer))
            self._hooks.add_forward(layer.module, hook, with_kwargs=True, prepend=True)
        if not is_tracing():
            with torch.no_grad(), full_precision(self._device):
                self._observe_operator_norms()

    def finish(self) -> None:
        """Record the number of skipped calls."""
        if self._layers:
            self._accumulator.add_result(self._skipped_calls, RCC_SKIPPED_CALLS, float(self._num_skipped), 1)

    def derive(self, numbers: NumbersOfStep) -> None:
        """Divide ratios of norms by operator norms. Without a change of weight or input there is no alignment."""
        derived: dict[Key, float] = {}
        for layer in self._layers:
            recorded = _recorded_norms(layer.streams)
            for name, stream in layer.alignments.items():
                assert layer.norms is not None
                norm_name = _NORM_OF_ALIGNMENT[name]
                ratio, norm = numbers.pop(stream.keys[name]), numbers.pop(layer.norms.keys[norm_name])
                if ratio is not None and ratio != _NO_ALIGNMENT and norm != 0:
                    # A ratio above the norm shows that the norm is slightly too small, or that the ratio consists of rounding errors.
                    derived[stream.series[name]] = min(ratio / (math.nan if norm is None else norm), 1.0)
                if norm is not None and norm_name in recorded:
                    derived[layer.norms.series[norm_name]] = norm
        numbers.write(numbers.columns.add(derived), [*derived.values()])

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    def _observe_call(self, layer: CheckedLayer, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Observe the terms of a call. A call that cannot be compared is counted; one whose terms cannot be computed gives NaN."""
        if not self._tools.observes_calls() or is_in_backward():
            return  # a recomputation repeats a call that was counted

        def fail(error: Exception) -> None:
            for stream in layer.streams.values():
                self._accumulator.fail(stream, output, error)

        # Modes of torch functions run code of others, and no public function turns them off.
        with failing_alone(fail), torch.no_grad(), torch._C.DisableTorchFunction():
            call = self._calls.take(layer.reference, layer)
            if call is None:
                self._num_skipped += 1  # the reference probe logs the missing call
                return
            with self._reference.gathered(layer.reference):
                self._observe(layer, layer.type.bind(layer.module, args, kwargs), output, call)

    def _observe(self, layer: CheckedLayer, inputs: list[Tensor] | None, output: object, call: NamedTensors) -> None:
        tensors = None if inputs is None else _tensors(layer, inputs, output, call)
        if tensors is None:
            self._num_skipped += 1
            self._tools.reporter.log_once(SKIPPED)
            return
        with full_precision(self._device):
            self._accumulator.observe_for(itertools.chain(_output_terms(layer, tensors), self._input_terms(layer, tensors)))

    def _input_terms(self, layer: CheckedLayer, tensors: CallTensors) -> Iterator[_Observed]:
        """The terms of the inputs, and of the tensor to which the weight is applied."""
        value, reference = tensors.inputs[0], tensors.reference_inputs[0]
        if layer.type.normalizes:
            yield from _terms_of_input(layer, value, reference, {}, layer.streams)
            value, reference = (layer.type.function(x, None, None, layer.module) for x in (value, reference))
            yield from _terms_of_input(layer, value, reference, layer.alignments, layer.weight_streams)
            return
        if layer.type.has_tensor_input:
            yield from _terms_of_input(layer, value, reference, layer.alignments, layer.streams, layer.weight_streams)
        for index, (further, other) in enumerate(zip(tensors.inputs[1:], tensors.reference_inputs[1:], strict=True), start=1):
            site = self._tools.names.output_name(layer.site, (index,), "input")
            yield from _terms_of_input(layer, further, other, {}, {kind: stream.at(site) for kind, stream in layer.streams.items()})

    def _observe_operator_norms(self) -> None:
        layers = [(layer, layer.norms) for layer in self._layers if layer.norms is not None]
        # Sharded weights are gathered layer by layer: all together may not fit in memory.
        groups = [[each] for each in layers] if is_laid_out(self._reference.module) else [layers]
        known = self._reference.operator_norms
        for group in groups:
            updates: dict[str, Difference] = {}
            references: dict[str, Difference] = {}
            with self._reference.gathered(*(module for layer, _norms in group for module in (layer.module, layer.reference))):
                for layer, stream in group:
                    with failing_alone(functools.partial(self._accumulator.fail, stream, layer.module)):
                        if "update" in stream.outputs:
                            updates[layer.site] = Difference(_matrices(layer, layer.module), _matrices(layer, layer.reference))
                        if "reference" in stream.outputs and layer.site not in known:
                            references[layer.site] = Difference(_matrices(layer, layer.reference))
                known.update(operator_norms(references))
                norms_by_name = {"update": operator_norms(updates), "reference": known}
            for (layer, stream), (name, norms) in itertools.product(group, norms_by_name.items()):
                if name in stream.outputs and layer.site in norms:
                    self._accumulator.add_result(stream, name, Unfinished(norms[layer.site], finished_norms), 1)


def operator_norms(weights: Mapping[str, Difference]) -> dict[str, Tensor]:
    """Numbers of the largest singular values of weights or of differences of weights, without a host read.

    Args:
        weights: By site: matrices, shape ``(groups, rows, columns)``, or a diagonal, shape ``(features,)``.

    Returns:
        By site what :func:`finished_norms` makes the largest singular value of.
    """
    diagonals = {site: weight.computed() for site, weight in weights.items() if weight.tensor.dim() == 1}
    numbers: dict[str, Tensor] = dict.fromkeys(weights, torch.zeros((), device="cpu"))  # of an empty weight
    numbers.update({site: torch.linalg.vector_norm(each, ord=torch.inf) for site, each in diagonals.items() if each.numel()})
    for sites, of_matrices in bidiagonals({site: weight for site, weight in weights.items() if site not in diagonals}):
        num_matrices = Counter(sites)
        numbers.update(zip(num_matrices, of_matrices.split([*num_matrices.values()]), strict=True))
    return numbers


def finished_norms(numbers: Sequence[Array]) -> list[float]:
    """The largest singular values of the matrices of sites, within ``TOLERANCE`` of the module ``spectra``."""
    norms = np.zeros(len(numbers))
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for index, of_site in enumerate(numbers):
        if of_site.ndim:
            alike[of_site.shape[1]].append(index)
        else:
            norms[index] = of_site
    for indices in alike.values():
        parts = [numbers[index] for index in indices]
        firsts = np.cumsum([0, *map(len, parts[:-1])])
        norms[indices] = np.maximum.reduceat(spectral_norms(np.concatenate(parts)), firsts)
    return [*map(float, norms)]


class CallTensors(NamedTuple):
    """The tensors of a call of a layer in the model and in the reference."""

    inputs: list[Tensor]
    reference_inputs: list[Tensor]
    output: Tensor
    """``W x + b``."""
    mixed_output: Tensor
    """``W0 x + b0``."""
    reference_output: Tensor
    """``W0 x0 + b0``."""
    bias: Tensor | None
    """In a shape that broadcasts to the output."""
    reference_bias: Tensor | None


def _tensors(layer: CheckedLayer, inputs: list[Tensor], output: object, call: NamedTensors) -> CallTensors | None:
    """The tensors of a call; ``None`` if the reference's call has other shapes."""
    kept = [tensor for _path, tensor in call]
    reference_inputs = kept[: len(layer.type.inputs)]
    if [x.shape for x in reference_inputs] != [x.shape for x in inputs]:
        return None
    weight, bias = weight_and_bias(layer.type, layer.module, is_running=True)
    # Under FSDP2 a running layer may have its weights in another precision.
    reference_parameters = [
        None if parameter is None else parameter.to(weight.dtype)
        for parameter in weight_and_bias(layer.type, layer.reference, is_running=False)
    ]
    function, module = layer.type.function, layer.module
    reference_output = kept[-1] if layer.type.gives_output else function(*reference_inputs, *reference_parameters, module)
    if not layer.type.gives_output:
        output = function(*inputs, weight, bias, module)
    if not is_plain(output) or output.shape != reference_output.shape:
        return None
    # torch selects kernels by requires_grad of inputs and weights. There is no graph under no_grad.
    for parameter, reference_parameter in zip(layer.type.parameters(module), reference_parameters, strict=True):
        if parameter is not None and reference_parameter is not None:
            reference_parameter.requires_grad_(parameter.requires_grad)
    # The model's module gives constants, because running statistics of a BatchNorm in eval mode change in the model alone.
    mixed_output = function(*inputs, *reference_parameters, module)
    biases = (_like_output(layer, each, mixed_output) for each in (bias, reference_parameters[1]))
    return CallTensors([x.detach() for x in inputs], reference_inputs, output.detach(), mixed_output, reference_output, *biases)


def _tensors_to_keep(layer: CheckedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> NamedTensors:
    """The inputs and then the output of a call of the reference's layer; nothing if the call cannot be compared."""
    inputs = layer.type.bind(layer.reference, args, kwargs)
    if inputs is None or (layer.type.gives_output and not is_plain(output)):
        return []
    return [*named_tensors(inputs), *(named_tensors(output) if layer.type.gives_output else ())]


def _output_terms(layer: CheckedLayer, call: CallTensors) -> Iterator[_Observed]:
    """The terms of outputs: each for the layer's site, and without the bias for the weight's site and the alignment."""
    bias, reference_bias = call.bias, call.reference_bias
    bias_change = None if bias is None or reference_bias is None else Difference(bias, reference_bias).computed()
    for kind, alignment, term, bias_of_term in (
        (OUTPUT, "", Difference(call.output), bias),
        (REFERENCE_OUTPUT, "", Difference(call.reference_output), reference_bias),
        (EFFECTIVE, "effective", Difference(call.output, call.mixed_output), bias_change),
        # Both outputs have the bias of the reference.
        (PROPAGATING, "propagating", Difference(call.mixed_output, call.reference_output), None),
    ):
        rows, weight_rows = _rows(kind, layer.streams), _rows(kind, layer.weight_streams)
        weight_rows += [(layer.alignments[alignment], OWN)] if alignment in layer.alignments else []
        if bias_of_term is None:
            rows, weight_rows = rows + weight_rows, []
        yield from _with_features_last(layer, term, rows)
        yield from _with_features_last(layer, Difference(term.tensor, term.other, bias_of_term), weight_rows)


def _terms_of_input(
    layer: CheckedLayer, value: Tensor, reference: Tensor, alignments: Mapping[str, Stream], *streams: Mapping[str, Stream]
) -> Iterator[_Observed]:
    """The terms of an input, for the streams of each mapping by kind; alignments get the norms of all vectors."""
    for kind, alignment, term in (
        (INPUT, "effective", Difference(value)),
        (INPUT_CHANGE, "propagating", Difference(value, reference)),
    ):
        rows = _rows(kind, *streams)
        aligned = [(alignments[alignment], BASE)] if alignment in alignments else []
        if layer.type.vectors is every_vector_once:
            rows += aligned
        elif aligned and layer.type.vectors is not None:
            vectors = layer.type.vectors(layer.module, term.written())
            if vectors is not None:
                yield Difference(vectors), aligned
        yield from _with_features_last(layer, term, rows)


def _with_features_last(layer: CheckedLayer, difference: Difference, rows: list[tuple[Stream, int]]) -> Iterator[_Observed]:
    """A term that is recorded anywhere, with its features as the last dimension if a stream depends on it."""
    if any(stream.depends_on_features for stream, _row in rows):
        tensor = difference.written()
        difference = Difference(tensor.movedim(layer.type.features(layer.module, tensor), -1))
    if rows:
        yield difference, rows


def _rows(kind: str, *streams: Mapping[str, Stream]) -> list[tuple[Stream, int]]:
    return [(by_kind[kind], OWN) for by_kind in streams if kind in by_kind]


def _like_output(layer: CheckedLayer, bias: Tensor | None, output: Tensor) -> Tensor | None:
    """A bias in a shape that broadcasts to the output."""
    if bias is None or bias.dim() > 1:
        return bias
    return bias.reshape(-1, *[1] * (output.dim() - 1 - layer.type.features(layer.module, output)))


def _matrices(layer: CheckedLayer, module: nn.Module) -> Tensor:
    weight, _bias = weight_and_bias(layer.type, module, is_running=False)
    return layer.type.matrices(module, weight)

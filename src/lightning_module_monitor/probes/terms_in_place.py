"""The terms of a plain layer, read where its tensors lie: by one call for its outputs, and one for its inputs.

What is prepared here once saves most of the Python that a term costs otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from lightning_module_monitor.probes.layer_again import LayerAgain
from lightning_module_monitor.probes.reference import Call
from lightning_module_monitor.probes.terms import Part, Term, Unit
from lightning_module_monitor.statistics.moments import Need
from lightning_module_monitor.statistics.observation import Observation
from lightning_module_monitor.statistics.running import Tokens, readable_address
from lightning_module_monitor.statistics.watch import BASE, Wish

_OF_TOKENS = (
    (Part.INPUT, Part.NOTHING),
    (Part.INPUT, Part.REFERENCE_INPUT),
    (Part.APPLIED, Part.NOTHING),
    (Part.APPLIED, Part.REFERENCE_APPLIED),
)
"""What the compiled kernel of normalized inputs measures, in its order."""


class TermsInPlace:
    """Reads the terms of a module that :func:`is_plain` is true of.

    Args:
        unit: The module.
    """

    def __init__(self, unit: Unit) -> None:
        module, outputs, inputs = unit.watched.site.module, unit.terms_of_output, unit.terms_of_input
        assert unit.layer is not None
        self._unit = unit
        self._normalization = unit.layer.token_normalization(module)
        self._outputs, self._wishes_of_output = _parts(outputs), [term.wishes for term in outputs]
        self._inputs, self._wishes_of_input = _parts(inputs), [term.wishes for term in inputs]
        self._wishes_of_tokens = [
            [wish for term in inputs if term.parts[:2] == of_tokens for wish in term.wishes] for of_tokens in _OF_TOKENS
        ]
        self._has_change = any(not {Part.REFERENCE_INPUT, Part.REFERENCE_APPLIED}.isdisjoint(term.parts) for term in inputs)

    def read(self, observation: Observation, run_again: LayerAgain, args: tuple[Any, ...], output: object, call: Call) -> bool:
        """Take in the terms of one call.

        Args:
            observation: Where they go.
            run_again: Runs the reference's module on the model's input.
            args: What the model's was called with; there were no keywords.
            output: What it gave.
            call: What the reference's got and gave.

        Returns:
            Whether that could be done; otherwise nothing was taken in.
        """
        tensors = self._tensors(args, output, call)
        if tensors is None:
            return False
        if self._unit.is_run_again:
            again = run_again(self._unit.twin, args)
            if again is None:
                return False
            tensors[Part.AGAIN] = again
        if Part.BIAS in tensors:
            tensors[Part.BIAS_CHANGE] = tensors[Part.BIAS].detach() - tensors[Part.REFERENCE_BIAS].detach()
        addresses = np.zeros(len(Part), dtype=np.int64)
        for part, tensor in tensors.items():
            addresses[part] = readable_address(tensor)
            if not addresses[part]:
                return False
        self._read_at(observation, addresses, tensors[Part.OUTPUT], tensors[Part.INPUT])
        return True

    def _tensors(self, args: tuple[Any, ...], output: object, call: Call) -> dict[Part, Tensor] | None:
        """What the terms are made of, all of one shape; ``None`` where anything is not as it is of a plain layer."""
        if len(args) != 1 or len(call.outputs) != 1 or (self._has_change and len(call.inputs) != 1):
            return None
        x, reference = args[0], call.outputs[0][1]
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or output.shape != reference.shape:
            return None
        tensors = {Part.OUTPUT: output, Part.REFERENCE_OUTPUT: reference, Part.INPUT: x}
        if self._has_change:
            tensors[Part.REFERENCE_INPUT] = call.inputs[0][1]
            if x.shape != tensors[Part.REFERENCE_INPUT].shape:
                return None
        bias, reference_bias = (one._parameters.get("bias") for one in (self._unit.watched.site.module, self._unit.twin))
        if bias is not None and reference_bias is not None:
            tensors |= {Part.BIAS: bias, Part.REFERENCE_BIAS: reference_bias}
        return tensors

    def _read_at(self, observation: Observation, addresses: np.ndarray, output: Tensor, x: Tensor) -> None:
        if self._wishes_of_output:
            observation.read_differences(addresses[self._outputs], output.numel(), output.shape[-1], self._wishes_of_output)
        if not self._wishes_of_input:
            return
        if self._normalization is None:
            observation.read_differences(addresses[self._inputs], x.numel(), x.shape[-1], self._wishes_of_input)
        else:
            places = int(addresses[Part.INPUT]), int(addresses[Part.REFERENCE_INPUT])
            observation.read_normalized(Tokens(*places, x.numel(), x.shape[-1], *self._normalization), self._wishes_of_tokens)


def is_plain(unit: Unit) -> bool:
    """Whether a module is of a type that is known here, with parameters of its own, and nothing but squares are wanted of its terms."""
    module, twin, layer = unit.watched.site.module, unit.twin, unit.layer
    is_known = layer is not None and (
        (layer.is_applied_once and layer.is_applied_to_input) or layer.token_normalization(module) is not None
    )
    if layer is None or not is_known or is_parametrized(module) or is_parametrized(twin):
        return False
    names = {"weight", "bias"} if layer.has_bias(module) else {"weight"}
    if not names <= module._parameters.keys() & twin._parameters.keys():
        return False
    return all(_is_of_squares(wish) for term in unit.terms_of_output + unit.terms_of_input for wish in term.wishes)


def _is_of_squares(wish: Wish) -> bool:
    watch, row = wish
    return watch.is_of_moments and (watch.base_needs if row == BASE else watch.needs) == Need.SQUARES


def _parts(terms: Sequence[Term]) -> np.ndarray:
    """Of each term the parts that it is made of, shape ``(terms, 3)``."""
    return np.array([term.parts for term in terms], dtype=np.int64).reshape(-1, 3)

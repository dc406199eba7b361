"""The terms of a plain layer, read where its tensors lie.

All that can be prepared is, once: within a step the caches belong to the layers, and Python that has left them is slow. What the
compiled kernel finds waits here, row by row, until the step is over.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_module_monitor.modules.hooks import runs_forward_alone
from lightning_module_monitor.probes.layers import TokenNormalization, layer_of
from lightning_module_monitor.probes.linear_again import Again, LinearAgain
from lightning_module_monitor.probes.reference import Call
from lightning_module_monitor.probes.terms import Part, Term, Unit
from lightning_module_monitor.statistics.moments import Moments, Need
from lightning_module_monitor.statistics.running import compiled_normalized, compiled_terms, readable_address
from lightning_module_monitor.statistics.watch import BASE, Wish

NUM_FIELDS = len(Moments._fields)

NORMALIZED = (
    (Part.INPUT, Part.NOTHING, Part.NOTHING),
    (Part.INPUT, Part.REFERENCE_INPUT, Part.NOTHING),
    (Part.APPLIED, Part.NOTHING, Part.NOTHING),
    (Part.APPLIED, Part.REFERENCE_APPLIED, Part.NOTHING),
    (Part.OUTPUT, Part.AGAIN, Part.NOTHING),
    (Part.OUTPUT, Part.AGAIN, Part.BIAS_CHANGE),
    (Part.AGAIN, Part.REFERENCE_OUTPUT, Part.NOTHING),
)
"""The terms that the compiled kernel of norms measures, in its order."""


class TermsInPlace:
    """Reads the terms of a module that :func:`is_plain` is true of.

    Args:
        unit: The module.
    """

    def __init__(self, unit: Unit) -> None:
        assert unit.layer is not None
        self._unit = unit
        self._normalization = unit.layer.token_normalization(unit.watched.site.module)
        self._is_linear = self._normalization is None
        bias = unit.twin._parameters.get("bias")
        self._parameters = _parameters(unit, has_weight=self._normalization is not None, has_bias=bias is not None)
        self._parts = np.zeros(len(Part), dtype=np.int64)
        self._bias_change = np.empty(0 if bias is None else bias.numel(), dtype=np.float32)
        if bias is not None:
            self._parts[Part.BIAS_CHANGE] = self._bias_change.ctypes.data
        of_output, of_input, self._forms = _sorted(unit, self._normalization)
        self._num_of_output, self._num_of_input = len(of_output), len(of_input)
        self._terms = [*of_output, *of_input, *(term for term, _form in self._forms)]
        self._wishes = [term.wishes for term in self._terms]
        self._recipe = np.array([term.parts for term in self._terms], dtype=np.int64)
        self._form_numbers = np.array([form for _term, form in self._forms], dtype=np.int64)
        self._totals = np.zeros((len(self._terms), NUM_FIELDS))
        arrays = (self._parts, self._recipe, self._form_numbers, self._totals)
        self._addresses = tuple(int(array.ctypes.data) for array in arrays)
        of_change = {Part.REFERENCE_INPUT, Part.REFERENCE_APPLIED} | ({Part.AGAIN} if self._forms else set())
        self._has_change = any(Part.OUTPUT not in term.parts and not of_change.isdisjoint(term.parts) for term in self._terms)
        """Whether the reference's input is needed."""
        self._has_read = False

    def read(self, run_again: LinearAgain, args: tuple[Any, ...], output: object, call: Call) -> bool:
        """Measure the terms of one call.

        Args:
            run_again: Runs the reference's module on the model's input.
            args: What the model's was called with; there were no keywords.
            output: What it gave.
            call: What the reference's got and gave.

        Returns:
            Whether that could be done; otherwise nothing was measured.
        """
        if len(args) != 1 or len(call.outputs) != 1 or (self._has_change and len(call.inputs) != 1):
            return False
        x, reference, x0 = args[0], call.outputs[0][1], call.inputs[0][1] if self._has_change else None
        if not (isinstance(output, Tensor) and isinstance(x, Tensor)) or output.shape != reference.shape:
            return False
        # A hook may have made a number of the output.
        if not output.dim() or output.shape[:-1] != x.shape[:-1] or (x0 is not None and x0.shape != x.shape):
            return False
        in_features, out_features = x.shape[-1], output.shape[-1]
        again = None
        if self._is_linear and self._unit.is_run_again:
            again = run_again.prepare(self._unit.twin, args)
            if again is None or again.prepared.result.shape != output.shape:
                return False
        is_readable = (
            self._is_known()
            and self._note_tensors(x, x0, output, reference, again)
            and self._note_parameters(out_features, 0 if again is None else again.bias_place)
        )
        if is_readable:
            self._measure(again, x.numel() // in_features, out_features, in_features)
        return is_readable

    def totals(self) -> tuple[list[list[Wish]], np.ndarray] | None:
        """What was measured since the last time, term by term, and who wishes for it; ``None`` if nothing was."""
        if not self._has_read:
            return None
        measured = self._wishes, self._totals.copy()
        self._totals[:] = 0.0
        self._has_read = False
        return measured

    def _note_tensors(self, x: Tensor, x0: Tensor | None, output: Tensor, reference: Tensor, again: Again | None) -> bool:
        """Note where they lie; says whether all of them can be read there."""
        parts = self._parts
        parts[Part.INPUT] = input_place = readable_address(x) if again is None else again.input_place
        parts[Part.OUTPUT] = output_place = readable_address(output)
        parts[Part.REFERENCE_OUTPUT] = reference_place = readable_address(reference)
        if not (input_place and output_place and reference_place):
            return False
        if again is not None:
            parts[Part.AGAIN] = again.prepared.result_place
        if x0 is not None:
            parts[Part.REFERENCE_INPUT] = readable_address(x0)
        return x0 is None or bool(parts[Part.REFERENCE_INPUT])

    def _note_parameters(self, features: int, bias_place: int) -> bool:
        """As :meth:`_note_tensors`, for parameters, of which the kernel reads as many elements as an output has features.

        Args:
            features: So many.
            bias_place: Where the reference's bias is known to lie, if not 0.
        """
        if len(self._bias_change) not in (0, features):
            return False
        for part, module, name in self._parameters:
            parameter = module._parameters.get(name)
            is_located = bias_place and part is Part.REFERENCE_BIAS
            self._parts[part] = place = bias_place if is_located else readable_address(parameter)
            if not place or parameter is None or parameter.numel() != features:
                return False
        return True

    def _is_known(self) -> bool:
        """Whether all is known that a norm does, the model's and the reference's: the kernel does it by itself."""
        return self._is_linear or (runs_forward_alone(self._unit.watched.site.module) and runs_forward_alone(self._unit.twin))

    def _measure(self, again: Again | None, num_tokens: int, out_features: int, in_features: int) -> None:
        """Run the reference's module, if it is, and measure what was noted."""
        terms, normalized = compiled_terms(), None if self._normalization is None else compiled_normalized()
        assert terms is not None
        parts, recipe, forms, totals = self._addresses
        of_output, of_input = self._num_of_output, self._num_of_input
        self._has_read = True
        if again is not None:
            # All that Python does is done by now: after the product its code and objects have left the caches.
            again.run()
        terms.add_terms(parts, recipe, of_output, of_input, num_tokens, out_features, in_features, totals)
        if self._normalization is not None and normalized is not None:
            totals += (of_output + of_input) * self._totals.strides[0]
            normalized.add_normalized(parts, forms, len(self._forms), num_tokens, in_features, *self._normalization, totals)


def _sorted(unit: Unit, normalization: TokenNormalization | None) -> tuple[list[Term], list[Term], list[tuple[Term, int]]]:
    """Terms of outputs and of inputs that are read as they are, and those of a norm, each with its number for the kernel."""
    if normalization is None:
        return unit.terms_of_output, unit.terms_of_input, []
    terms = unit.terms_of_output + unit.terms_of_input
    of_norm = [(term, NORMALIZED.index(term.parts)) for term in terms if term.parts in NORMALIZED]
    return [term for term in terms if term.parts not in NORMALIZED], [], of_norm


def _parameters(unit: Unit, *, has_weight: bool, has_bias: bool) -> list[tuple[Part, nn.Module, str]]:
    """The parameters that the kernel reads: as what, whose, and their names."""
    module, twin = unit.watched.site.module, unit.twin
    of_weight = [(Part.WEIGHT, module, "weight"), (Part.REFERENCE_WEIGHT, twin, "weight")] if has_weight else []
    of_bias = [(Part.BIAS, module, "bias"), (Part.REFERENCE_BIAS, twin, "bias")] if has_bias else []
    return of_weight + of_bias


def is_plain(unit: Unit) -> bool:
    """Whether a module is of a type that is known here, with parameters of its own, and nothing but squares are wanted of its terms."""
    module, twin, layer = unit.watched.site.module, unit.twin, unit.layer
    is_known = layer is not None and (
        (layer.is_applied_once and layer.is_applied_to_input) or layer.token_normalization(module) is not None
    )
    if layer is None or not is_known or is_parametrized(module) or is_parametrized(twin):
        return False
    if layer_of(twin) is not layer or layer.token_normalization(module) != layer.token_normalization(twin):
        return False
    names = {"weight", "bias"} if layer.has_bias(module) else {"weight"}
    if any({name for name in ("weight", "bias") if one._parameters.get(name) is not None} != names for one in (module, twin)):
        return False
    return all(_is_of_squares(wish) for term in unit.terms_of_output + unit.terms_of_input for wish in term.wishes)


def _is_of_squares(wish: Wish) -> bool:
    watch, row = wish
    return watch.is_of_moments and (watch.base_needs if row == BASE else watch.needs) == Need.SQUARES

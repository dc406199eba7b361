"""Which modules the coordinate check is of, and what kinds there are of each."""

from __future__ import annotations

from torch import nn

from lightning_module_monitor.modules.names import UNWATCHED
from lightning_module_monitor.probes.layers import layer_of

EFFECTIVE, PROPAGATING = "rcc_effective_update", "rcc_propagating_update"
OUTPUT, REFERENCE_OUTPUT = "rcc_output", "rcc_reference_output"
INPUT, INPUT_CHANGE = "rcc_input", "rcc_input_change"
OPERATOR_NORM, ALIGNMENT = "rcc_operator_norm", "rcc_alignment"

TERMS = (EFFECTIVE, PROPAGATING, OUTPUT, REFERENCE_OUTPUT, INPUT, INPUT_CHANGE)
"""The kinds that are tensors."""

KINDS = (*TERMS, OPERATOR_NORM, ALIGNMENT)
"""The kinds of the check."""

_OF_INPUTS = (PROPAGATING, INPUT, INPUT_CHANGE)


def units(root: nn.Module) -> set[nn.Module]:
    """The modules that are checked: those that own weights, each as a whole.

    What is inside of a layer of a known type, or of ``torch.nn.MultiheadAttention``, is part of that. Of any other module
    that owns weights, the parts are checked too.
    """
    found: set[nn.Module] = set()
    seen: set[nn.Module] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module in seen or isinstance(module, UNWATCHED):
            continue
        seen.add(module)
        is_whole = layer_of(module) is not None or isinstance(module, nn.MultiheadAttention)
        if is_whole or any(one is not None and one.is_floating_point() for one in module._parameters.values()):
            found.add(module)
        if not is_whole:
            waiting += module.children()
    return found


def has_kind(module: nn.Module, kind: str) -> bool:
    """Whether there is such a kind of a module that is checked."""
    layer = layer_of(module)
    if kind in (OPERATOR_NORM, ALIGNMENT):
        return layer is not None
    return kind not in _OF_INPUTS or not isinstance(module, nn.Embedding | nn.EmbeddingBag)


def has_weight_site(module: nn.Module, kind: str) -> bool:
    """Whether the weight of a module that is checked, without the bias, is a site of its own."""
    layer = layer_of(module)
    return kind in TERMS and layer is not None and layer.weight_is_site and has_kind(module, kind)

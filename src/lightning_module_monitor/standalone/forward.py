"""For a module's ``forward``: its monitor, and the recording of attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_module_monitor.model.hooks import is_in_backward, is_tracing
from lightning_module_monitor.monitor import ModuleMonitor, monitor_of


class MonitorMixin:
    """Gives a module access to its monitor, under the callback and in a plain loop.

    It stores nothing on the module: a copy, or a module from a pickle, has no monitor until ``set_module`` gets it::

        class Gated(nn.Module, MonitorMixin):
            def forward(self, x: Tensor) -> Tensor:
                gate = torch.sigmoid(self.gate(x))
                if self.is_monitoring:
                    self.get_module_monitor().log_tensor("gate/blocks.0/open_fraction", (gate > 0.5).float())
                return gate * self.body(x)
    """

    @property
    def is_monitoring(self) -> bool:
        """Whether this call is observed; false in a checkpoint's recomputation, and while torch traces or transforms."""
        if is_tracing() or is_in_backward():
            return False
        monitor = self.get_module_monitor()
        return monitor is not None and monitor.is_monitoring()

    def get_module_monitor(self) -> ModuleMonitor | None:
        """The monitor of this module, or ``None``. Among several, a monitor that observes now, or else the newest."""
        return monitor_of(self) if isinstance(self, nn.Module) else None


def monitor_scaled_dot_product_attention(  # noqa: PLR0917  # torch's own arguments, in its order
    monitor: ModuleMonitor,
    module: nn.Module | str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    activation: Tensor | None = None,
    is_reference: bool = False,
) -> None:
    """Record statistics of attention for each head, if this step is monitored.

    For attention that is not computed by ``F.scaled_dot_product_attention`` or ``nn.MultiheadAttention``, which rules of the kinds
    ``attention_*`` observe. A call that is both observed and reported counts once.

    Keys of head i: ``attention_entropy/{module}.head_{i}/...`` and the other kinds ``attention_*``, by the rules of these kinds that
    match the module; without such a rule the mean of the entropy. Activation rules and metrics that match the module also record
    ``activation/{module}.head_{i}.query/...``, ``.key``, ``.value`` and ``.activation``.

    Args:
        monitor: The monitor.
        module: The module of this attention, or its name.
        query: Shape ``(..., heads, queries, features)``, any floating dtype.
        key: Shape ``(..., heads, keys, features)``, with fewer heads under ``enable_gqa``.
        value: Shape ``(..., heads, keys, value_features)``, with fewer heads under ``enable_gqa``.
        attn_mask: As for ``F.scaled_dot_product_attention``: broadcasts to ``(..., heads, queries, keys)``; a boolean mask is true
            for the keys that take part, any other mask is added to the logits.
        dropout_p: Not used: weights are recorded before dropout.
        is_causal: Whether query token i attends to keys 0 to i only.
        scale: Factor of the logits; ``None`` is ``1 / sqrt(features)``.
        enable_gqa: Whether several heads of the query share a head of key and value.
        activation: The output of attention, shape ``(..., heads, queries, value_features)``.
        is_reference: Whether ``module`` belongs to the reference, which runs before the model. Then only rules and metrics of
            ``activation_difference`` that match the model's module use the tensors, for the differences of each head.

    Raises:
        ValueError: If there is no such module.
    """
    if torch.compiler.is_compiling():
        return  # a compiled graph is the same with and without a monitor
    # With three dimensions, the first has the heads, not the batch.
    query, key, value = (tensor if tensor.dim() > 3 else tensor.unsqueeze(0) for tensor in (query, key, value))
    if activation is not None and activation.dim() == 3:
        activation = activation.unsqueeze(0)
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    monitor.monitor_attention(module, {"query": query, "key": key, "value": value, **options}, activation, is_reference=is_reference)

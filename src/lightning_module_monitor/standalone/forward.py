"""For use within a module's ``forward``: its monitor, and reports of attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_module_monitor.model.hooks import is_in_backward, is_tracing
from lightning_module_monitor.monitor import ModuleMonitor, monitor_of


class MonitorMixin:
    """Gives a module access to its monitor, under the callback and in a plain loop.

    It stores nothing on the module: a copy, or a module from a pickle, has no monitor until it is set as the module of one::

        class Gated(nn.Module, MonitorMixin):
            def forward(self, x: Tensor) -> Tensor:
                gate = torch.sigmoid(self.gate(x))
                if self.is_monitoring:
                    self.get_module_monitor().log_tensor("gate/blocks.0/open_fraction", (gate > 0.5).float())
                return gate * self.body(x)
    """

    @property
    def is_monitoring(self) -> bool:
        """Whether this call is observed: not in the recomputation of a checkpointed forward pass, nor while torch traces."""
        if is_tracing() or is_in_backward():
            return False
        monitor = self.get_module_monitor()
        return monitor is not None and monitor.is_monitoring()

    def get_module_monitor(self) -> ModuleMonitor | None:
        """The monitor of this module, or ``None``. Among several, one that observes now, otherwise the newest."""
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
    ``attention_*`` observe themselves. A call that is observed and also reported right before or after counts once.

    Keys of head i: ``attention_entropy/{module}.head_{i}/...`` and the other kinds ``attention_*``, by the rules of these kinds that
    match the module; without any such rule the mean of the entropy. Activation rules and metrics that match the module also record
    ``activation/{module}.head_{i}.query/...``, ``.key``, ``.value`` and ``.activation``.

    Args:
        monitor: The monitor.
        module: The module that it belongs to, or its name.
        query: Shape ``(..., heads, queries, features)``, any floating dtype.
        key: Shape ``(..., heads, keys, features)``, with ``enable_gqa`` of fewer heads.
        value: Shape ``(..., heads, keys, value_features)``, with ``enable_gqa`` of fewer heads.
        attn_mask: As for ``F.scaled_dot_product_attention``: broadcasts to ``(..., heads, queries, keys)``; a mask of booleans is true
            for the keys that take part, any other is added to the logits.
        dropout_p: Not used: the weights are those before dropout.
        is_causal: Whether query token i attends to keys 0 to i only.
        scale: Factor of the logits; ``None`` is one over the square root of ``features``.
        enable_gqa: Whether several heads of the query share one of key and value.
        activation: The output of attention, shape ``(..., heads, queries, value_features)``.
        is_reference: Whether ``module`` belongs to the reference, which runs before the model. Then nothing is recorded for it; rules
            and metrics of ``activation_difference`` that match the model's module get the differences of the tensors of each head.

    Raises:
        ValueError: If there is no such module.
    """
    if torch.compiler.is_compiling():
        return  # what is compiled is the same with a monitor and without
    # The first of three dimensions is that of the heads, not of the batch.
    query, key, value = (one if one.dim() > 3 else one.unsqueeze(0) for one in (query, key, value))
    if activation is not None and activation.dim() == 3:
        activation = activation.unsqueeze(0)
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    monitor.monitor_attention(module, {"query": query, "key": key, "value": value, **options}, activation, is_reference=is_reference)

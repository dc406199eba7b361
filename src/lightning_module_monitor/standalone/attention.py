"""Attention that a model tells of by hand, from within its forward."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_module_monitor.monitor import ModuleMonitor


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
    """Record what attention does, head by head, in the step that is monitored; in others nothing happens.

    For attention that is computed by other means than ``F.scaled_dot_product_attention`` and ``nn.MultiheadAttention``, which
    rules of the kinds ``attention_*`` see by themselves. A call that is told right before or after it is seen counts once.

    What is recorded of head i: ``attention_entropy/{module}.head_{i}/...`` and its kin under the rules of these kinds that
    match the module, and where no rule is of such a kind the mean of the entropy; and, under the activation rules and metrics
    that match the module, ``activation/{module}.head_{i}.query/...``, ``.key``, ``.value`` and ``.activation``.

    Args:
        monitor: The monitor.
        module: The module that it belongs to, or its name.
        query: Shape ``(..., heads, queries, features)``, any floating dtype.
        key: Shape ``(..., heads, keys, features)``, with ``enable_gqa`` of fewer heads.
        value: Shape ``(..., heads, keys, value_features)``, with ``enable_gqa`` of fewer heads.
        attn_mask: As of ``F.scaled_dot_product_attention``: broadcasts to ``(..., heads, queries, keys)``; of booleans, true
            lets a key be seen, others are added to the logits.
        dropout_p: Not used: the weights are those before dropout.
        is_causal: Whether query token i sees keys 0 to i only.
        scale: Factor of the logits; ``None`` is one over the square root of ``features``.
        enable_gqa: Whether several heads of the query share one of key and value.
        activation: What attention returned, shape ``(..., heads, queries, value_features)``.
        is_reference: Whether ``module`` is one of the reference's, which runs before the model. Nothing is recorded of it, but by rules
            and metrics of ``activation_difference`` that match the model's module the difference of the tensors of each head.

    Raises:
        ValueError: If there is no such module.
    """
    # Of three dimensions the first is that of the heads, and not of the batch.
    query, key, value = (one if one.dim() > 3 else one.unsqueeze(0) for one in (query, key, value))
    if activation is not None and activation.dim() == 3:
        activation = activation.unsqueeze(0)
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    tell = monitor.monitor_reference_attention if is_reference else monitor.monitor_attention
    tell(module, {"query": query, "key": key, "value": value, **options}, activation)

"""How layers of known types act on their input: ``y = W x + b``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from lightning_module_monitor.random_states import unchanged_random_states
from lightning_module_monitor.statistics.running import in_memory

AnyModule = Any
"""A module of the type that a layer describes, with that type's attributes."""


class TokenNormalization(NamedTuple):
    """How every token, all features of the last dimension, is normalized by itself.

    Attributes:
        is_centered: Whether the mean is taken from it first.
        epsilon: What is added to the mean square before its root is divided by.
    """

    is_centered: bool
    epsilon: float


class Layer:
    """A type of layer. Methods get a module of it, the model's or the reference's; these are those of ``torch.nn.Linear``."""

    weight_is_site = True
    """Whether the weight alone, without the bias, is a site of its own."""
    is_applied_once = True
    """Whether the weight is applied to every vector of :meth:`applied_to` just once, so that :meth:`vectors` is that."""
    is_applied_to_input = True
    """Whether :meth:`applied_to` gives the input itself."""

    def channels(self, module: AnyModule, tensor: Tensor) -> int:
        """The dimension of an input's or output's features."""
        return tensor.dim() - 1

    def token_normalization(self, module: AnyModule) -> TokenNormalization | None:
        """How :meth:`applied_to` is made of the input, where it is so."""
        return None

    def has_bias(self, module: AnyModule) -> bool:
        """Whether there is a bias."""
        return is_parametrized(module, "bias") or getattr(module, "bias", None) is not None

    def bias(self, module: AnyModule, output: Tensor) -> Tensor | None:
        """The bias, in a shape in which it is added to the output."""
        bias = _read(module, "bias")
        return None if bias is None else bias.reshape(-1, *[1] * (output.dim() - 1 - self.channels(module, output)))

    def weight(self, module: AnyModule) -> Tensor:
        """The weight as a linear map: matrices of shape ``(groups, rows, columns)``, or a diagonal, shape ``(features,)``."""
        return _weight(module).unsqueeze(0)

    def applied_to(self, module: AnyModule, x: Tensor) -> Tensor | None:
        """What the weight is applied to, of the input: itself, where it is that; ``None`` where there is no such tensor."""
        return x

    def vectors(self, module: AnyModule, x: Tensor) -> Tensor | None:
        """A tensor of the norm of all vectors that :meth:`weight` is applied to; of what :meth:`applied_to` gives.

        ``None`` where that norm times the operator norm does not bound the term.
        """
        return x


class _Embedding(Layer):
    """The input is indices: there is nothing that could change a little."""

    weight_is_site = False
    is_applied_to_input = False

    def applied_to(self, module: AnyModule, x: Tensor) -> Tensor | None:
        return None


class _Bilinear(Layer):
    """The weight, ``(out_features, in1_features, in2_features)``, is applied to the products of all pairs of two inputs' features."""

    is_applied_to_input = False

    def weight(self, module: AnyModule) -> Tensor:
        return _weight(module).flatten(1).unsqueeze(0)

    def applied_to(self, module: AnyModule, x: Tensor) -> Tensor | None:
        return None


class _Convolution(Layer):
    """The weight is applied to every patch of the input."""

    is_applied_once = False

    def __init__(self, convolve: Callable[..., Tensor]) -> None:
        self._convolve = convolve

    def channels(self, module: AnyModule, tensor: Tensor) -> int:
        return tensor.dim() - 1 - len(module.kernel_size)

    def weight(self, module: AnyModule) -> Tensor:
        weight = _weight(module)
        return weight.reshape(module.groups, weight.shape[0] // module.groups, -1)

    def vectors(self, module: AnyModule, x: Tensor) -> Tensor | None:
        # The norm of each patch: squares summed over the channels, then over the places of the kernel.
        squares, padding = self._batched(module, _wide(x)).square().sum(1, keepdim=True), module.padding
        if module.padding_mode != "zeros":
            squares, padding = F.pad(squares, module._reversed_padding_repeated_twice, module.padding_mode), 0
        kernel = squares.new_ones(1, 1, *module.kernel_size)
        return self._convolve(squares, kernel, None, module.stride, padding, module.dilation).clamp_(min=0).sqrt_()

    def _batched(self, module: AnyModule, x: Tensor) -> Tensor:
        return x if self.channels(module, x) else x.unsqueeze(0)


class _TransposedConvolution(_Convolution):
    """The weight is applied at every place of the input, and what overlaps is added."""

    def vectors(self, module: AnyModule, x: Tensor) -> Tensor | None:
        # A sum of m numbers is at most sqrt(m) times the norm of them: m of the place where most overlap.
        places = torch.ones((1, 1, *x.shape[self.channels(module, x) + 1 :]), device=x.device)
        kernel = places.new_ones(1, 1, *module.kernel_size)
        overlap = self._convolve(places, kernel, None, module.stride, module.padding, module.output_padding, 1, module.dilation)
        return _wide(x) * overlap.max().sqrt()


class _Norm(Layer):
    """The weight is a diagonal, applied to what was normalized; the features are those of ``normalized_shape``."""

    is_applied_to_input = False

    def __init__(self, normalize: Callable[[AnyModule, Tensor], Tensor]) -> None:
        self._normalize = normalize

    def bias(self, module: AnyModule, output: Tensor) -> Tensor | None:
        return _read(module, "bias")

    def weight(self, module: AnyModule) -> Tensor:
        return _weight(module).flatten()

    def applied_to(self, module: AnyModule, x: Tensor) -> Tensor | None:
        return self._normalize(module, x)


class _TokenNorm(_Norm):
    """As :class:`_Norm`, of every token by itself.

    Args:
        normalize: Does so.
        is_centered: Whether the mean is taken from a token first.
    """

    def __init__(self, normalize: Callable[[AnyModule, Tensor], Tensor], *, is_centered: bool) -> None:
        super().__init__(normalize)
        self._is_centered = is_centered

    def token_normalization(self, module: AnyModule) -> TokenNormalization | None:
        epsilon = torch.finfo(torch.float32).eps if module.eps is None else module.eps
        return TokenNormalization(self._is_centered, epsilon) if len(module.normalized_shape) == 1 else None


class _ChannelNorm(_Norm):
    """As :class:`_Norm`; the features are the second dimension."""

    is_applied_once = False

    def channels(self, module: AnyModule, tensor: Tensor) -> int:
        return 1

    def bias(self, module: AnyModule, output: Tensor) -> Tensor | None:
        return Layer.bias(self, module, output)

    def vectors(self, module: AnyModule, x: Tensor) -> Tensor | None:
        # With frozen statistics the reference normalizes by its own, and the terms are of these as well.
        return x if module.training or getattr(module, "running_mean", None) is None else None


def _layer_norm(module: AnyModule, x: Tensor) -> Tensor:
    return F.layer_norm(x, module.normalized_shape, None, None, module.eps)


def _rms_norm(module: AnyModule, x: Tensor) -> Tensor:
    return F.rms_norm(x, module.normalized_shape, None, module.eps)


def _group_norm(module: AnyModule, x: Tensor) -> Tensor:
    return F.group_norm(x, module.num_groups, None, None, module.eps)


def _batch_norm(module: AnyModule, x: Tensor) -> Tensor:
    if module.training or module.running_mean is None:
        return F.batch_norm(x, None, None, None, None, training=True, eps=module.eps)
    return F.batch_norm(x, module.running_mean, module.running_var, None, None, training=False, eps=module.eps)


def _instance_norm(module: AnyModule, x: Tensor) -> Tensor:
    if module.training or module.running_mean is None:
        return F.instance_norm(x, eps=module.eps)
    return F.instance_norm(x, module.running_mean, module.running_var, use_input_stats=False, eps=module.eps)


_BY_FORWARD: dict[object, Layer] = {
    nn.Linear.forward: Layer(),
    nn.Embedding.forward: _Embedding(),
    nn.Bilinear.forward: _Bilinear(),
    nn.Conv1d.forward: _Convolution(F.conv1d),
    nn.Conv2d.forward: _Convolution(F.conv2d),
    nn.Conv3d.forward: _Convolution(F.conv3d),
    nn.ConvTranspose1d.forward: _TransposedConvolution(F.conv_transpose1d),
    nn.ConvTranspose2d.forward: _TransposedConvolution(F.conv_transpose2d),
    nn.ConvTranspose3d.forward: _TransposedConvolution(F.conv_transpose3d),
    nn.LayerNorm.forward: _TokenNorm(_layer_norm, is_centered=True),
    nn.RMSNorm.forward: _TokenNorm(_rms_norm, is_centered=False),
    nn.GroupNorm.forward: _ChannelNorm(_group_norm),
    nn.BatchNorm2d.forward: _ChannelNorm(_batch_norm),
    nn.SyncBatchNorm.forward: _ChannelNorm(_batch_norm),
    nn.InstanceNorm2d.forward: _ChannelNorm(_instance_norm),
}
"""Layer by what the module runs, so that a subclass with a ``forward`` of its own is not taken for what it is derived from."""


def layer_of(module: nn.Module) -> Layer | None:
    """How a module acts on its input; ``None`` if it is of no known type, or has no weight."""
    layer = _BY_FORWARD.get(type(module).forward)
    if layer is None or module._parameters.get("weight") is not None:
        return layer
    has_weight = is_parametrized(module, "weight") or isinstance(getattr(module, "weight", None), Tensor)
    return layer if has_weight else None


def _weight(module: AnyModule) -> Tensor:
    weight = _read(module, "weight")
    assert weight is not None
    return weight


def _read(module: AnyModule, name: str) -> Tensor | None:
    """A weight or bias, detached. A parametrized one is computed anew, by a copy: buffers would move (spectral norm), and hooks see it.

    Raises:
        ValueError: If its memory was given back.
    """
    plain = module._parameters.get(name)
    if plain is not None:
        return in_memory(plain).detach()
    if not is_parametrized(module, name):
        tensor: Tensor | None = getattr(module, name, None)
        return None if tensor is None else tensor.detach()
    parametrizations = copy.deepcopy(module.parametrizations[name])
    with torch.no_grad(), unchanged_random_states(next(parametrizations.parameters()).device):
        computed: Tensor = parametrizations()
        return computed


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()

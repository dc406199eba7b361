"""The layer types of the refined coordinate check, each with a pure function of input, weight and bias.

The check computes ``W0 x`` with that function and never calls a module a second time. A module belongs to a type if it inherits
the type's ``forward`` and owns its weight as a plain parameter, which is not computed from other parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from lightning_module_monitor.distributed.shards import is_sharded, whole
from lightning_module_monitor.kernels.elements import in_memory, plain, widened
from lightning_module_monitor.model.names import parametrizations_of

EFFECTIVE, PROPAGATING = "rcc_effective_update", "rcc_propagating_update"
OUTPUT, REFERENCE_OUTPUT = "rcc_output", "rcc_reference_output"
INPUT, INPUT_CHANGE = "rcc_input", "rcc_input_change"
OPERATOR_NORM, ALIGNMENT = "rcc_operator_norm", "rcc_alignment"

TERMS = (EFFECTIVE, PROPAGATING, OUTPUT, REFERENCE_OUTPUT, INPUT, INPUT_CHANGE)
"""The kinds of tensors."""

AnyModule = Any
"""A module of a layer type, with that type's attributes."""

LayerFunction = Callable[..., Tensor]
"""``function(x, weight, bias, module)``: ``W x + b``. ``module`` gives constants such as ``stride``; ``bias`` may be ``None``."""


def _registered_parameters(module: AnyModule) -> tuple[Tensor | None, Tensor | None]:
    return module._parameters.get("weight"), module._parameters.get("bias")


def every_vector_once(module: AnyModule, x: Tensor) -> Tensor | None:
    """The ``vectors`` of a layer type that applies the weight to every vector of a tensor once."""
    return x


@dataclass(frozen=True, kw_only=True)
class LayerType:
    """How the modules of a type apply their weight.

    Attributes:
        function: ``W x + b``, see :data:`LayerFunction`; several inputs come first, in order. By default that of ``nn.Linear``.
        inputs: Names of the inputs in the type's ``forward``.
        methods: Methods that a subclass must inherit.
        has_tensor_input: Whether the input has real numbers, and not indices.
        is_called: Whether the module is called. Otherwise its parent uses its weight.
        gives_output: Whether ``function`` returns the module's output. Otherwise it returns an intermediate result, and the module's call
            may have further arguments, which do not change ``W x + b``.
        parameters: Weight and bias of a module; ``None`` if it does not own such a parameter.
        features: The dimension of an input or output that holds the features.
        matrices: The weight as a linear map: matrices, shape ``(groups, rows, columns)``, or a diagonal, shape ``(features,)``.
        normalizes: Whether the weight is applied to the normalized input, which ``function`` returns without weight and bias.
        vectors: Converts the input of the weight to a tensor whose norm is that of all vectors that ``matrices`` multiplies;
            it returns ``None`` if the product of both norms does not bound the term. A type without ``vectors`` has no alignment.
    """

    function: LayerFunction = lambda x, weight, bias, module: F.linear(x, weight, bias)
    inputs: tuple[str, ...] = ("input",)
    methods: tuple[str, ...] = ("forward",)
    has_tensor_input: bool = True
    is_called: bool = True
    gives_output: bool = True
    parameters: Callable[[AnyModule], tuple[Tensor | None, Tensor | None]] = _registered_parameters
    features: Callable[[AnyModule, Tensor], int] = lambda module, tensor: tensor.dim() - 1
    matrices: Callable[[AnyModule, Tensor], Tensor] = lambda module, weight: weight.unsqueeze(0)
    normalizes: bool = False
    vectors: Callable[[AnyModule, Tensor], Tensor | None] | None = every_vector_once

    def has_kind(self, kind: str) -> bool:
        """Whether the type has values of a kind."""
        if kind == OPERATOR_NORM:
            return True
        if kind == ALIGNMENT:
            return self.is_called and self.vectors is not None
        return self.is_called and (self.has_tensor_input or kind in (OUTPUT, REFERENCE_OUTPUT, EFFECTIVE))

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """The inputs of a call, in order; ``None`` if one is missing or not a plain tensor, or if the call has other arguments."""
        names = _argument_names(type(module).forward) if kwargs or not self.gives_output else self.inputs
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = [plain(value) for value in (arguments.pop(name, None) for name in self.inputs) if is_plain(value)]
        has_others = len(args) > len(names) or (self.gives_output and any(value is not None for value in arguments.values()))
        return None if has_others or len(tensors) != len(self.inputs) else tensors


@functools.cache
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a strided tensor, without ``__torch_dispatch__`` of a subclass."""
    if not isinstance(value, Tensor) or type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return plain(value).layout is torch.strided


def _embedding_parameters(module: AnyModule) -> tuple[Tensor | None, Tensor | None]:
    # With max_norm a look-up writes into the weight.
    return (None, None) if module.max_norm is not None else _registered_parameters(module)


def _hugging_face_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, module: AnyModule) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    product = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return product.view(*x.shape[:-1], weight.shape[1])


def _scaled_by_mup(module: AnyModule, x: Tensor) -> Tensor:
    return module.output_mult * x / module.width_mult()  # type: ignore[no-any-return]  # as its forward does, in this order


def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, module: AnyModule) -> Tensor:
    if module.training or module.running_mean is None:  # without the running statistics, which the call would change
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=module.eps)
    return F.batch_norm(x, module.running_mean, module.running_var, weight, bias, training=False, eps=module.eps)


def _normalization(function: LayerFunction, **options: Any) -> LayerType:
    return LayerType(function=function, matrices=lambda _module, weight: weight.flatten(), normalizes=True, **options)


def _any_matrix(_module: AnyModule, weight: Tensor) -> Tensor:
    """Matrices of a weight of any shape: a vector is a diagonal, otherwise the first dimension has the rows."""
    return weight if weight.dim() == 1 else weight.flatten(1).unsqueeze(0)


def _vectors_of_batch_norm(module: AnyModule, x: Tensor) -> Tensor | None:
    # In eval mode the terms also contain the difference between the running statistics of model and reference.
    return x if module.training or module.running_mean is None else None


def _features_of_convolution(module: AnyModule, tensor: Tensor) -> int:
    return tensor.dim() - 1 - len(module.kernel_size)


def _matrices_of_convolution(module: AnyModule, weight: Tensor) -> Tensor:
    return weight.reshape(module.groups, weight.shape[0] // module.groups, -1)


def _padded(module: AnyModule, x: Tensor) -> tuple[Tensor, Any]:
    """The input, padded if the convolution does not support the padding mode, and the padding left to the convolution."""
    if module.padding_mode == "zeros":
        return x, module.padding
    return F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode), 0


def _convolution(convolve: Callable[..., Tensor]) -> LayerType:
    def function(x: Tensor, weight: Tensor, bias: Tensor | None, module: AnyModule) -> Tensor:
        padded, padding = _padded(module, x)
        return convolve(padded, weight, bias, module.stride, padding, module.dilation, module.groups)

    def vectors(module: AnyModule, x: Tensor) -> Tensor:
        # The norm of each patch: squares are summed over the channels, then over the kernel.
        batched = widened(x if _features_of_convolution(module, x) else x.unsqueeze(0))
        squares, padding = _padded(module, batched.square().sum(1, keepdim=True))
        kernel = squares.new_ones(1, 1, *module.kernel_size)
        return convolve(squares, kernel, None, module.stride, padding, module.dilation).clamp_(min=0).sqrt_()

    methods = ("forward", "_conv_forward")
    return LayerType(
        function=function, methods=methods, features=_features_of_convolution, matrices=_matrices_of_convolution, vectors=vectors
    )


def _transposed_convolution(convolve: Callable[..., Tensor]) -> LayerType:
    def function(x: Tensor, weight: Tensor, bias: Tensor | None, module: AnyModule) -> Tensor:
        return convolve(x, weight, bias, module.stride, module.padding, module.output_padding, module.groups, module.dilation)

    def vectors(module: AnyModule, x: Tensor) -> Tensor:
        # A sum of m numbers is at most sqrt(m) times their norm, and up to m patches overlap.
        ones = torch.ones((1, 1, *x.shape[_features_of_convolution(module, x) + 1 :]), device=x.device)
        kernel = ones.new_ones(1, 1, *module.kernel_size)
        overlap = convolve(ones, kernel, None, module.stride, module.padding, module.output_padding, 1, module.dilation)
        return widened(x) * overlap.max().sqrt()

    return LayerType(function=function, features=_features_of_convolution, matrices=_matrices_of_convolution, vectors=vectors)


def _projection(index: int, name: str) -> LayerType:
    """A projection of ``torch.nn.MultiheadAttention``, whose weight is a part of one parameter or a separate parameter."""

    def parameters(module: AnyModule) -> tuple[Tensor | None, Tensor | None]:
        start = index * module.embed_dim
        weight = module._parameters.get("in_proj_weight")
        weight = module._parameters.get(f"{name}_proj_weight") if weight is None else weight[start : start + module.embed_dim]
        bias = module._parameters.get("in_proj_bias")
        return weight, None if bias is None else bias[start : start + module.embed_dim]

    return LayerType(inputs=("query", "key", "value")[index : index + 1], gives_output=False, parameters=parameters)


LinearMaps = dict[str, LayerType]
"""The linear maps of a module by name; ``""`` is the name of the module's only map."""

_TYPES: dict[type[nn.Module] | str, LayerType | LinearMaps] = {
    nn.Linear: LayerType(),
    # MultiheadAttention uses the weight of this layer and never calls it.
    NonDynamicallyQuantizableLinear: LayerType(is_called=False),
    nn.Conv1d: _convolution(F.conv1d),
    nn.Conv2d: _convolution(F.conv2d),
    nn.Conv3d: _convolution(F.conv3d),
    nn.ConvTranspose1d: _transposed_convolution(F.conv_transpose1d),
    nn.ConvTranspose2d: _transposed_convolution(F.conv_transpose2d),
    nn.ConvTranspose3d: _transposed_convolution(F.conv_transpose3d),
    nn.Embedding: LayerType(
        function=lambda x, weight, bias, module: F.embedding(x, weight),
        has_tensor_input=False,
        vectors=None,
        parameters=_embedding_parameters,
    ),
    nn.Bilinear: LayerType(
        function=lambda x, other, weight, bias, module: F.bilinear(x, other, weight, bias),
        inputs=("input1", "input2"),
        matrices=_any_matrix,
        vectors=None,
    ),
    nn.LayerNorm: _normalization(lambda x, weight, bias, module: F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)),
    nn.RMSNorm: _normalization(lambda x, weight, bias, module: F.rms_norm(x, module.normalized_shape, weight, module.eps), inputs=("x",)),
    nn.GroupNorm: _normalization(
        lambda x, weight, bias, module: F.group_norm(x, module.num_groups, weight, bias, module.eps), features=lambda module, tensor: 1
    ),
    **dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        _normalization(_batch_norm, features=lambda module, tensor: 1, vectors=_vectors_of_batch_norm),
    ),
    nn.MultiheadAttention: {f"{name}_proj": _projection(index, name) for index, name in enumerate("qkv")},
    "transformers.pytorch_utils.Conv1D": LayerType(function=_hugging_face_conv1d, inputs=("x",)),
    "mup.layer.MuReadout": LayerType(
        function=lambda x, weight, bias, module: F.linear(_scaled_by_mup(module, x), weight, bias), inputs=("x",), vectors=_scaled_by_mup
    ),
}
"""The linear maps of each class; a class whose package may be missing stands by name."""


def register_rcc_layer(layer_type: type[nn.Module], function: LayerFunction) -> None:
    """Add a type of layer to the refined coordinate check, or replace one.

    The type's modules own parameters ``weight`` and, if they have one, ``bias``; features are the last dimension. A subclass
    belongs to the type if it inherits ``forward``. Register a type before the monitor gets its module.

    Args:
        layer_type: A class of modules whose ``forward`` takes one tensor and computes ``W x + b``.
        function: ``function(x, weight, bias, module)``, which computes the same as ``forward``, with this weight and bias. It must
            not write into its arguments. ``module`` gives constants. ``bias`` is ``None`` if the module has none.

    Raises:
        TypeError: If the type is not a class of modules, or the function does not take four arguments.

    Example:
        >>> class Scale(torch.nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(3))
        ...
        ...     def forward(self, x):
        ...         return x * self.weight
        >>> register_rcc_layer(Scale, lambda x, weight, bias, module: x * weight)
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise TypeError(f"layer_type is {layer_type!r}; expected a subclass of torch.nn.Module.")
    try:
        inspect.signature(function).bind("x", "weight", "bias", "module")
    except TypeError as error:
        raise TypeError(f"function {function!r} does not take the arguments (x, weight, bias, module): {error}.") from error
    inputs = _argument_names(layer_type.forward)[:1]
    _TYPES[layer_type] = LayerType(function=function, inputs=inputs, matrices=_any_matrix, vectors=None)


def layer_parts(module: nn.Module) -> LinearMaps:
    """The linear maps of a module; empty if its type is not in the table, or its weight no tensor that the check can compute with."""
    if any(is_parametrized(module, name) or isinstance(vars(module).get(name), Tensor) for name in ("weight", "bias")):
        return {}  # computed from other parameters, as spectral norm, weight norm and pruning do
    for base in type(module).__mro__:
        maps = _TYPES.get(base) or _TYPES.get(f"{base.__module__}.{base.__qualname__}")
        if maps is None:
            continue
        maps = {"": maps} if isinstance(maps, LayerType) else maps
        for method in next(iter(maps.values())).methods:
            if getattr(type(module), method) is not getattr(base, method) or method in vars(module):
                return {}
        weights = {name: layer_type.parameters(module)[0] for name, layer_type in maps.items()}
        return {name: maps[name] for name, weight in weights.items() if weight is not None and _is_supported(weight)}
    return {}


def _is_supported(weight: Tensor) -> bool:
    """Whether a weight is real and plain, or laid out over ranks; a quantized one is not supported."""
    return weight.is_floating_point() and (is_plain(weight) or is_sharded(weight))


def weight_and_bias(part: LayerType, module: nn.Module, *, is_running: bool) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear map of a module, detached.

    Args:
        part: The linear map.
        module: The module.
        is_running: Whether its forward pass runs now, with whole weights under FSDP2. Otherwise a collective gathers sharded weights.

    Raises:
        ValueError: If the weight is a tensor of a subclass, or if its memory was freed.
    """
    weight, bias = (tensor if tensor is None or is_running else whole(tensor) for tensor in part.parameters(module))
    assert weight is not None
    if not is_plain(weight) or (bias is not None and not is_plain(bias)):
        raise ValueError(f"its weight is a {type(weight).__name__}; expected a plain tensor")
    return in_memory(weight).detach(), None if bias is None else in_memory(bias).detach()


def layer_sites(module: nn.Module, kind: str) -> list[str]:
    """Suffixes of the module's name at the sites of a kind: ``""``, ``".weight"``, ``".q_proj"``, ``".q_proj.weight"``."""
    suffixes = []
    for name, part in layer_parts(module).items():
        start = f".{name}" if name else ""
        suffixes += [start] if part.has_kind(kind) else []
        # The term without the bias; the weight of a layer with several inputs is applied to their product.
        is_product = kind in (INPUT, INPUT_CHANGE) and len(part.inputs) > 1
        if kind in TERMS and part.has_tensor_input and part.has_kind(kind) and not is_product:
            suffixes.append(f"{start}.weight")
    return suffixes


def has_own_weights(module: nn.Module) -> bool:
    """Whether a floating-point parameter belongs to a module: it owns one, or has an attribute that is computed from one."""
    if isinstance(module, ParametrizationList):
        return False  # its parameters belong to a layer
    parameters = [parameter for owner in (module, *parametrizations_of(module)) for parameter in owner._parameters.values()]
    return any(parameter is not None and parameter.is_floating_point() for parameter in parameters)

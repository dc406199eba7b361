"""Models that are compiled in every way, and a backend that counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.lightning_package import LightningModule


class CountingBackend:
    """Compiles by another backend, or not at all, and counts how often, and how often what was compiled has run."""

    def __init__(self, inner: Callable[..., Any] | None = None) -> None:
        self._inner = inner
        self.num_compilations = self.num_runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.num_compilations += 1
        compiled = graph.forward if self._inner is None else self._inner(graph, inputs)

        def run(*arguments: Any) -> Any:
            self.num_runs += 1
            return compiled(*arguments)

        return run

    @property
    def counts(self) -> tuple[int, int]:
        """Compilations and runs."""
        return self.num_compilations, self.num_runs


class Block(nn.Module):
    """LayerNorm, GELU, dropout and a residual: a compiler rounds otherwise in bfloat16."""

    def __init__(self, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(F.gelu(self.fc(self.norm(x))))


class Attention(nn.Module):
    """Attention by torch's function, which a mode observes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[:, None]).chunk(3, dim=-1)
        return x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0, 0]


class Net(nn.Module):
    """Layers that stay as they are around two blocks that may be compiled."""

    def __init__(self, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.stem, self.attention = nn.Linear(6, width), Attention(width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.head = nn.Linear(width, 3)
        self.checkpoints = False

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.head(self.encode(self.attention(self.stem(x))))
        return prediction


class Trained(LightningModule):
    """Logs nothing: what Lightning logs with cannot be compiled as a whole."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = Net() if model is None else model

    def forward(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.model(x)
        return prediction

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _blocks(module: Trained, options: dict[str, Any]) -> None:
    blocks = module.model.blocks
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, **options)


def _blocks_in_place(module: Trained, options: dict[str, Any]) -> None:
    for block in module.model.blocks:
        block.compile(**options)


def _forward(module: Trained, options: dict[str, Any]) -> None:
    for block in module.model.blocks:
        block.forward = torch.compile(block.forward, **options)


def _decorated(module: Trained, options: dict[str, Any]) -> None:
    compiled = type("Decorated", (Block,), {"forward": torch.compile(Block.forward, **options)})
    for block in module.model.blocks:
        block.__class__ = compiled


def _checkpointed(module: Trained, options: dict[str, Any]) -> None:
    module.model.checkpoints = True
    _blocks(module, options)


def _function(module: Trained, options: dict[str, Any]) -> None:
    """A function, which a module holds, around modules of its closure."""
    one, other = module.model.blocks
    module.model.encode = torch.compile(lambda x: other(one(x)), **options)


def _method(module: Trained, options: dict[str, Any]) -> None:
    module.model.encode = torch.compile(module.model.encode, **options)


class _Elsewhere(Net):
    """Its compiled function is found nowhere."""

    functions: ClassVar[list[Callable[[nn.Module, Tensor], Tensor]]] = []

    def encode(self, x: Tensor) -> Tensor:
        return self.functions[-1](self, x)


def _elsewhere(module: Trained, options: dict[str, Any]) -> None:
    module.model.__class__ = _Elsewhere
    _Elsewhere.functions.append(torch.compile(Net.encode, **options))


def _part(module: Trained, options: dict[str, Any]) -> None:
    module.model = torch.compile(module.model, **options)


WAYS: dict[str, Callable[[Trained, dict[str, Any]], Any]] = {
    "whole": lambda module, options: torch.compile(module, **options),
    "whole, in place": lambda module, options: module.compile(**options),
    "part": _part,
    "in place": lambda module, options: module.model.compile(**options),
    "blocks": _blocks,
    "blocks, in place": _blocks_in_place,
    "blocks, forward": _forward,
    "blocks, a decorated forward": _decorated,
    "blocks, checkpointed": _checkpointed,
    "a function that a module holds": _function,
    "a method that a module holds": _method,
    "a function around the model": _elsewhere,
}
"""How a model is compiled: a function of the model, and of the options of ``torch.compile``, which gives what is trained, or ``None``."""

WITHOUT_OUTSIDE = ("whole", "whole, in place", "part", "in place")
"""The ways in which no layer is outside of compiled code."""

OF_PARAMETERS = ["parameter", "gradient", "update"]


def everything(how: str) -> dict[str, Any]:
    """Every option that has something outside of the compiled code."""
    rules = [
        {"kinds": OF_PARAMETERS, "statistics": ["norm", "hist", "median", "underflow_bfloat16"]},
        {"kinds": ["optimizer_state", "update"], "statistics": ["norm", "cosine_to_gradient"]},
        {"kinds": "update", "statistics": "cosine_to_previous"},
        {"kinds": "gradient", "statistics": "norm", "per_module": ["_root_", r"model\.blocks\.\d"]},
        {"kinds": "parameter_difference", "statistics": "ratio"},
    ]
    # A mode of torch's is on in a module whose attention is recorded: here in the one that calls the function.
    has_attention = how not in (*WITHOUT_OUTSIDE, "a function around the model")
    common = {
        "health": {"nonfinite": "always", "watch": "all" if has_attention else ["vanishing", "exploding"]},
        "stages": ["train", "validate"],
        "reference": "init",
        "store": True,
        "gradient_noise": True,
        "alerts": [{"keys": "gradient/model.stem.weight/norm", "above": 0.0, "then": "capture"}],
    }
    if how in WITHOUT_OUTSIDE:
        return {**common, "rules": rules}
    kinds = ["activation", "activation_gradient", "activation_difference"]
    flow = ["model.blocks.0", "model.blocks.1"] if how.startswith("blocks") else ["model.stem", "model.head"]
    return {
        **common,
        "rules": [
            *rules,
            {"kinds": kinds, "statistics": ["mean", "hist", "median"]},
            {"kinds": "activation", "statistics": ["dead_fraction", "outlier_channels"]},
            {"kinds": "activation_difference", "statistics": "ratio"},
        ],
        "attention": has_attention,
        "rcc": True,
        "gradient_flow": {"blocks": flow},
        "capture": {"sites": "model.head", "steps": [0, 2], "kinds": ["activation", "gradient"]},
    }


def compiled(how: str, backend: CountingBackend | str, module: Trained | None = None, **options: Any) -> tuple[Trained, Any]:
    """A model that is compiled in one of the ways, and what to give to the Trainer."""
    module = Trained() if module is None else module
    given = WAYS[how](module, {"backend": backend, **options})
    return module, module if given is None else given


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """The weights, by the names that they have where nothing is compiled."""
    return {name.replace("_orig_mod.", ""): value.clone() for name, value in module.state_dict().items()}

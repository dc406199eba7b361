"""Architectures whose kernels torch selects by grad mode and ``requires_grad``: each makes three logits of six numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, TOKENS = 32, 24


class Tokens(nn.Module):
    """Six numbers as a sequence of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, TOKENS * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x).view(-1, TOKENS, WIDTH)


class Recurrent(nn.Module):
    """Two layers of an LSTM or GRU with dropout between them, both directions."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.tokens = Tokens()
        self.cells = kind(WIDTH, WIDTH, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)  # type: ignore[call-arg]
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.tokens(x))[0].mean(1))


class Encoder(nn.Module):
    """``nn.TransformerEncoder``, which has a kernel of its own for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(x)).mean(1))


class Attention(nn.Module):
    """Attention by the function; in windows, if there is a size, with a bias for each relative position, as in Swin."""

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.window = window
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if window:
            self.bias = nn.Parameter(0.02 * torch.randn(2 * window - 1, 4))
            places = torch.arange(window)
            self.register_buffer("index", places[:, None] - places[None] + window - 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (-1, self.window)).flatten(0, 1) if self.window else x
        query, key, value = self.query_key_value(tokens).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.index].permute(2, 0, 1) if self.window else None
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).flatten(2)).reshape(x.shape)


class Block(nn.Module):
    """A block of a ViT, or of a Swin transformer with shifted windows."""

    def __init__(self, window: int = 0, shift: int = 0) -> None:
        super().__init__()
        self.shift = shift
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(window)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.norm_1(x).roll(-self.shift, 1)).roll(self.shift, 1)
        x = x + mixed
        return x + self.mlp(self.norm_2(x))


class Pooling(nn.Module):
    """The mean of tokens, weighted by a learned query: torch folds a product with a vector if that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * (x @ self.query).softmax(1).unsqueeze(-1)).sum(1)


class VisionTransformer(nn.Module):
    """Patches by a convolution, a token that is pooled from them, ViT blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(6, 3 * 8 * 12)
        self.patches = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.pooling = Pooling()
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + TOKENS, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(self.image(x).view(-1, 3, 8, 12)).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.pooling(tokens).unsqueeze(1), tokens], 1) + self.positions
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class Swin(nn.Module):
    """Blocks with windows of eight tokens, every other one shifted, and patches that are merged."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()
        self.blocks = nn.Sequential(Block(8), Block(8, shift=4))
        self.merge = nn.Conv1d(WIDTH, WIDTH, 2, stride=2)
        self.pooling, self.head = Pooling(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        merged = self.merge(self.blocks(self.tokens(x)).transpose(1, 2)).transpose(1, 2)
        return self.head(self.pooling(merged))


class SelectiveScan(nn.Module):
    """A Mamba block in plain torch: a causal convolution, and a recurrence whose rates are functions of the input."""

    def __init__(self, states: int = 8) -> None:
        super().__init__()
        self.states = states
        self.tokens = Tokens()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 2 * WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)
        self.select = nn.Linear(WIDTH, 2 * states)
        self.step, self.steps = nn.Parameter(0.2 * torch.randn(WIDTH)), nn.Linear(1, WIDTH)
        self.rates = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(WIDTH, 1))
        self.skip = nn.Parameter(torch.ones(WIDTH))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, 3)

    def scan(self, x: Tensor) -> Tensor:
        """The recurrence, token by token."""
        b, c = self.select(x).chunk(2, -1)
        steps = F.softplus(self.steps((x @ self.step).unsqueeze(-1)))
        decay = torch.exp(-steps.unsqueeze(-1) * self.rates.exp())
        entering = steps.unsqueeze(-1) * b.unsqueeze(2) * x.unsqueeze(-1)
        state, outputs = torch.zeros_like(entering[:, 0]), []
        for token in range(x.shape[1]):
            state = decay[:, token] * state + entering[:, token]
            outputs.append(torch.einsum("bws,bs->bw", state, c[:, token]))
        return torch.stack(outputs, 1) + self.skip * x

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        inner, gate = self.project(self.norm(h)).chunk(2, -1)
        inner = F.silu(self.mix(inner.transpose(1, 2))[..., :TOKENS].transpose(1, 2))
        return self.head((h + self.dropout(self.scan(inner) * F.silu(gate))).mean(1))


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "transformer": Encoder,
    "vit": VisionTransformer,
    "swin": Swin,
    "mamba": SelectiveScan,
}

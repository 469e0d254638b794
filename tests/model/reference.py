"""The same GPT written with mlx.nn, weight by weight, as any MLX user would: the independent reference of the tests."""

import mlx.core as mx
import mlx.nn as nn


class Block(nn.Module):
    def __init__(self, width, heads, mlp):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, mlp), nn.Linear(mlp, width)

    def __call__(self, x):
        b, t, d = x.shape
        q, k, v = (
            y.reshape(b, t, self.heads, -1).transpose(0, 2, 1, 3) for y in mx.split(self.qkv(self.norm1(x)), 3, axis=-1)
        )
        scores = (q @ k.transpose(0, 1, 3, 2)) / (d // self.heads) ** 0.5
        scores = scores + nn.MultiHeadAttention.create_additive_causal_mask(t)
        a = mx.softmax(scores, axis=-1) @ v
        x = x + self.out(a.transpose(0, 2, 1, 3).reshape(b, t, d))
        return x + self.down(nn.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab, context, layers, width, heads, mlp):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = [Block(width, heads, mlp) for _ in range(layers)]
        self.norm = nn.LayerNorm(width)

    def __call__(self, ids):
        x = self.tokens(ids) + self.positions(mx.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.as_linear(self.norm(x))


def names(layers):
    """mlxdet's name -> this module's name."""
    table = {"token_embedding.weight": "tokens.weight", "position_embedding.weight": "positions.weight",
             "norm.weight": "norm.weight", "norm.bias": "norm.bias"}  # fmt: skip
    for i in range(layers):
        for ours, theirs in {"norm1": "norm1", "norm2": "norm2", "attention.qkv": "qkv", "attention.out": "out",
                             "mlp.up": "up", "mlp.down": "down"}.items():  # fmt: skip
            for kind in ("weight", "bias"):
                table[f"blocks.{i}.{ours}.{kind}"] = f"blocks.{i}.{theirs}.{kind}"
    return table

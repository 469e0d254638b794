"""Layers for your own MLX models whose gradients add in a fixed order, and the walk that puts them into a model.

Importing this package imports MLX and pins none of the settings that MLX reads once: `make_deterministic` says which
are not in force. `mlxdet.backends.activate()`, called before MLX is imported, pins them.
"""

from mlxdet.nn.conv import Conv1d, Conv2d, Conv3d
from mlxdet.nn.embedding import Embedding, lookup
from mlxdet.nn.norms import LayerNorm, RMSNorm
from mlxdet.nn.replace import Left, Replaced, Report, make_deterministic

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Embedding",
    "LayerNorm",
    "Left",
    "RMSNorm",
    "Replaced",
    "Report",
    "lookup",
    "make_deterministic",
]

"""CUDA: the settings that choose kernels, and norms and attention without the races of the fused ones."""

from mlxdet.backends.cuda.pins import pins as pins

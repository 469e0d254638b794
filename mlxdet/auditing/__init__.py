"""The audit: which operations of a traced MLX function can give different bits on Metal, CUDA or the CPU."""

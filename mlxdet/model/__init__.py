"""The GPT, its initial weights, and the gradient of its embedding."""

"""The stored forms of weights: read from tensors, declared in configs, written, and rules between two of them."""

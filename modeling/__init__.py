"""Native PyTorch modules, one mechanism a file."""

"""kconv: Kimi K3 checkpoints into native PyTorch modules and back, bit-exactly, with proof."""

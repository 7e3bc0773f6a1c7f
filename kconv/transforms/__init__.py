"""Reversible steps between the tensors of two layouts, one file a format."""

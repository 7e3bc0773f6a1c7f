"""Adapters of draft checkpoints, one file a family."""

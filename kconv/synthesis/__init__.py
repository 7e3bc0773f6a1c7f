"""Checkpoints made from a seed: small faithful ones with random weights, and full-size ones without data (`kconv tiny`)."""

"""Benchmarks: ratios measured in one run, since machines are noisy; never asserted in a test."""

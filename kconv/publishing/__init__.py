"""Finished folders on the Hub: model cards, checks, hashes, uploads."""

"""Carrying out a plan: slabs of it read, converted and written by workers."""

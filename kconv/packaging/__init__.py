"""Draft packages: made, described, and checked against their target."""

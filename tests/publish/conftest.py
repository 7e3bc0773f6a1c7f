"""Fixtures of the publishing tests."""

from tests.hubserver.fixtures import hub, hub_token

__all__ = ["hub", "hub_token"]

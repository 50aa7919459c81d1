"""`make` builds a configuration to change."""

from tests.config.conftest import composed, make

__all__ = ["composed", "make"]

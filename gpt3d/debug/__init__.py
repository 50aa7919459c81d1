"""Aids for finding faults, chosen with `debug=` and off in a normal run: see docs/debug.md."""

from gpt3d.debug.aids import Aids
from gpt3d.debug.deterministic import make_deterministic
from gpt3d.debug.fault import inject_fault
from gpt3d.debug.nonfinite import NonFiniteFound

__all__ = ["Aids", "NonFiniteFound", "inject_fault", "make_deterministic"]

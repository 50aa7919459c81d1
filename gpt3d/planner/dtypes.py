"""Bytes of a number of each type."""

from __future__ import annotations

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

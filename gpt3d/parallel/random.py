"""Random numbers as a function of names, so that no generator state has to be saved, split or replayed.

A dropout mask is drawn from (run seed, step, sample, layer, site, shard). Recompute draws the same mask again, a
resumed run goes on with the same masks, and ranks that hold copies of an activation agree, without any stored state.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor


def derive(*keys: int) -> int:
    """A 63-bit seed from integers."""
    return int.from_bytes(hashlib.blake2b(struct.pack(f"<{len(keys)}q", *keys), digest_size=8).digest(), "little") >> 1


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """Zero each element with probability `p`, scale the others by 1/(1-p); the mask is a function of `seed`."""
    if p == 0.0:
        return x
    # Tensors without numbers (a dry run) have no generator of their own, and need none.
    generator = torch.Generator(device="cpu" if x.is_meta else x.device).manual_seed(seed)
    drop = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(p, generator=generator)
    return x.masked_fill(drop, 0.0) * (1.0 / (1.0 - p))


def seed_default_generator(device: torch.device, seed: int) -> None:
    """For kernels that draw from the device's default generator and take no other (dropout inside attention)."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)

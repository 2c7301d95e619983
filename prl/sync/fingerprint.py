"""The proof of a weight update: trainer and engine hash what they hold and must agree.

A tensor's digest covers its name, shape, dtype and the exact bits of its values: all of them (`full`) or
a fixed pseudo-random subset (`sampled`), so that any difference in what is read changes the result. The
digests are combined in order of the names, so the order in which tensors arrive does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

MODES = ("sampled", "full")
SAMPLES_PER_TENSOR = 4096
_STRIDE = 2_654_435_761  # odd and near 2**32 / golden ratio: positions spread over rows and columns alike


class Fingerprinter:
    """Collects tensors one at a time, for callers that stream a model."""

    def __init__(self, mode: str = "sampled") -> None:
        if mode not in MODES:
            raise ValueError(f"fingerprint mode {mode!r}: must be one of {', '.join(MODES)}")
        self._mode = mode
        self._digests: dict[str, bytes] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor (any shape, dtype and device) into account. Raises ValueError on a second `name`."""
        if name in self._digests:
            raise ValueError(f"{name}: two tensors of this name in one set of weights")
        digest = hashlib.blake2b(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode(), digest_size=16)
        digest.update(_bits(_values(tensor.detach(), self._mode)))
        self._digests[name] = digest.digest()

    def result(self) -> str:
        """Fingerprint of everything added so far: 32 hexadecimal digits after the mode."""
        whole = hashlib.blake2b(digest_size=16)
        for name in sorted(self._digests):
            whole.update(self._digests[name])
        return f"{self._mode}:{whole.hexdigest()}"


def fingerprint(tensors: Iterable[tuple[str, Tensor]], mode: str = "sampled") -> str:
    """Fingerprint of a set of named tensors; equal on every process and device that holds the same bits."""
    prints = Fingerprinter(mode)
    for name, tensor in tensors:
        prints.add(name, tensor)
    return prints.result()


def _values(tensor: Tensor, mode: str) -> Tensor:
    flat = tensor.reshape(-1)
    if mode == "full" or flat.numel() <= SAMPLES_PER_TENSOR:
        return flat
    steps = torch.arange(SAMPLES_PER_TENSOR, device=flat.device)
    return flat[(steps * _STRIDE) % flat.numel()]


def _bits(values: Tensor) -> bytes:
    if values.numel() == 0:
        return b""
    return values.contiguous().view(torch.uint8).cpu().numpy().tobytes()

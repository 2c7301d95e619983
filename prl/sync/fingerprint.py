"""The proof of a weight update: trainer and engine hash what they hold and must agree.

A tensor's digest covers its name, shape, dtype and the exact bits of its values: all of them (`full`) or
a fixed pseudo-random subset (`sampled`), so that any difference in what is read changes the result. The
digests are combined in order of the names, so the order in which tensors arrive does not matter.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

MODES = ("sampled", "full")
SAMPLES_PER_TENSOR = 4096
_STRIDE = 2_654_435_761  # odd and near 2**32 / golden ratio: positions spread over rows and columns alike


class Fingerprinter:
    """Collects tensors one at a time, for callers that stream a model.

    What is sampled on a GPU stays there until `result`, which fetches it all at once: one wait for the device
    instead of one for each tensor.
    """

    def __init__(self, mode: str = "sampled") -> None:
        if mode not in MODES:
            raise ValueError(f"fingerprint mode {mode!r}: must be one of {', '.join(MODES)}")
        self.mode = mode
        self._digests: dict[str, bytes] = {}
        self._headers: dict[str, bytes] = {}
        self._on_device: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor (any shape, dtype and device) into account. Raises ValueError on a second `name`."""
        take = covered_copy if self._stays(tensor) else covered
        self.add_covered(name, tuple(tensor.shape), take(tensor, self.mode))

    def add_covered(self, name: str, shape: tuple[int, ...], covered_values: Tensor) -> None:
        """As `add` of a tensor of this `shape`, of which the covered elements were taken before.

        On a GPU they must not change until `result`.
        """
        if name in self._headers:
            raise ValueError(f"{name}: two tensors of this name in one set of weights")
        self._headers[name] = _header(name, shape, covered_values.dtype)
        values = covered_values.contiguous().view(torch.uint8)
        if self._stays(values):
            self._on_device[name] = values
        else:
            self._digest(name, values if values.device.type == "cpu" else values.cpu())

    def result(self) -> str:
        """Fingerprint of everything added so far: 32 hexadecimal digits after the mode."""
        for device in {values.device for values in self._on_device.values()}:
            here = {name: values for name, values in self._on_device.items() if values.device == device}
            fetched = torch.cat(list(here.values())).cpu().split([len(values) for values in here.values()])
            for name, values in zip(here, fetched, strict=True):
                self._digest(name, values)
        self._on_device.clear()
        whole = hashlib.blake2b(digest_size=16)
        for name in sorted(self._digests):
            whole.update(self._digests[name])
        return f"{self.mode}:{whole.hexdigest()}"

    def _stays(self, tensor: Tensor) -> bool:
        """Whether its values are fetched in `result` only."""
        return tensor.device.type == "cuda" and self.mode == "sampled"

    def _digest(self, name: str, values: Tensor) -> None:
        digest = hashlib.blake2b(self._headers[name], digest_size=16)
        digest.update(values.numpy())
        self._digests[name] = digest.digest()


@functools.lru_cache(maxsize=4096)  # the same tensors come at every version
def _header(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    return f"{name}|{shape}|{dtype}|".encode()


def fingerprint(tensors: Iterable[tuple[str, Tensor]], mode: str = "sampled") -> str:
    """Fingerprint of a set of named tensors; equal on every process and device that holds the same bits."""
    prints = Fingerprinter(mode)
    for name, tensor in tensors:
        prints.add(name, tensor)
    return prints.result()


def covered(tensor: Tensor, mode: str) -> Tensor:
    """The elements of a tensor that a fingerprint reads, flat, on its device; a view where that is all."""
    tensor = tensor.detach()
    positions = covered_positions(tensor.numel(), mode, tensor.device)
    if positions is None:
        return tensor.reshape(-1)
    if tensor.is_contiguous():
        return tensor.view(-1).index_select(0, positions)
    return tensor[torch.unravel_index(positions, tensor.shape)]  # flattening it would copy all of it


def covered_copy(tensor: Tensor, mode: str) -> Tensor:
    """As `covered`, in memory of its own: that of the tensor may be used again."""
    values = covered(tensor, mode)
    return values.clone() if len(values) == tensor.numel() else values


def covered_positions(size: int, mode: str, device: torch.device | str = "cpu") -> Tensor | None:
    """Where a flat tensor of `size` elements is read: [SAMPLES_PER_TENSOR]; None for everywhere."""
    if mode == "full" or size <= SAMPLES_PER_TENSOR:
        return None
    return _positions(size, torch.device(device))


@functools.lru_cache(maxsize=256)
def _positions(size: int, device: torch.device) -> Tensor:
    """Where a tensor of `size` elements is read; a model has few sizes, so they are kept."""
    return (torch.arange(SAMPLES_PER_TENSOR, device=device) * _STRIDE) % size

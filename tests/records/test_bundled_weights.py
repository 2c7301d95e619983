"""The weights that ship are those whose making is recorded."""

from __future__ import annotations

import hashlib

import pytest

import prl.assets


@pytest.mark.parametrize("name", ["tiny", "tiny_teacher"])
def test_the_recorded_checksum_is_that_of_the_file(name: str) -> None:
    weights = prl.assets.bundled_model(name) / "model.safetensors"
    assert weights.stat().st_size < 1_000_000
    assert hashlib.sha256(weights.read_bytes()).hexdigest() in (prl.assets.__doc__ or "")

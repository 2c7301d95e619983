"""Rotary position embedding, in the half-rotation layout of Hugging Face models."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prl.inference.decoder_config import DecoderConfig


def rope_tables(config: DecoderConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [length, 1, head_dim] float32; the sign of the rotation is folded into sin, so that
    a rotated head is `x * cos + roll(x, head_dim // 2) * sin` (RoFormer, arXiv:2104.09864)."""
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(config))
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    return cos[:, None].to(device), sin[:, None].to(device)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `heads` [n, heads, head_dim] by the table rows `cos` and `sin` [n, 1, head_dim]."""
    return torch.addcmul(heads * cos, torch.roll(heads, heads.shape[-1] // 2, dims=-1), sin)


def _frequencies(config: DecoderConfig) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope["rope_theta"] ** exponents)
    if config.rope["rope_type"] == "linear":
        return frequencies / config.rope["factor"]
    if config.rope["rope_type"] == "llama3":
        return _llama3(frequencies, config.rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: dict) -> Tensor:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, the band between blended."""
    waves = 2 * math.pi / frequencies
    cycles = rope["original_max_position_embeddings"] / waves
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((cycles - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / rope["factor"] + keep * frequencies

"""Models that ship with prl: weights and tokenizers small enough to be package data."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent


def bundled_models() -> list[str]:
    """Names that `bundled_model` knows."""
    return sorted(path.parent.name for path in ROOT.glob("*/config.json"))


def bundled_model(name: str) -> Path:
    """Directory of a bundled model, as `from_pretrained` takes it. Raises ValueError on an unknown name."""
    if name not in bundled_models():
        raise ValueError(f"no bundled model {name!r}; prl ships: {', '.join(bundled_models())}")
    return ROOT / name

"""Models that ship with prl: weights and tokenizers small enough to be package data.

`tiny`: the policy of the first run, made by `python -m prl sft experiment=tiny_warm_start` (seed 0).
SHA-256 of its model.safetensors: 646a9d7dc606062cfd3358b226687baf978f76ae013ca1a59444815f7216a171.

`tiny_teacher`: the frozen teacher of `algo=opd` and `algo=sft` on `model=tiny`; the same network, trained
from `tiny` by prl's own RL until it uses the brackets (mean reward 0.91 on reverse_text, 0.48 on arithmetic):

    python -m prl run.name=teacher env=[reverse_text,arithmetic] max_steps=60 seed=0 ckpt=end
    python -m prl export run=outputs/teacher out=prl/assets/tiny_teacher

SHA-256 of its model.safetensors: 6880133f64fa0f586397b144141427d64e2740b5c7b7f73c1d951eac5aee4064.
Sampling is asynchronous, so a second making gives a teacher of the same quality and not the same bytes.
"""

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

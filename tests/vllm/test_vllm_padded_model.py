"""The model that vLLM is tested with computes what the bundled one computes (runs without vLLM)."""

import torch
from padded_model import write_padded_tiny
from transformers import AutoModelForCausalLM

from prl.assets import bundled_model


def test_padding_changes_no_logit(tmp_path):
    ids = torch.randint(8, 264, (3, 60), generator=torch.Generator().manual_seed(0))
    logits = []
    for directory in (bundled_model("tiny"), write_padded_tiny(tmp_path / "padded")):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-3
    assert logits[1].std() > 0.5

"""Model directories, built once a session."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import inference_models
import pytest
import torch


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory):
    """family -> directory, built when first asked for."""
    built = {}

    def directory(family: str):
        if family not in built:
            path = tmp_path_factory.mktemp(family)
            built[family] = inference_models.save(inference_models.build(family), path)
        return built[family]

    return directory


@pytest.fixture(scope="session")
def tiny_dir(model_dirs):
    """A tied Qwen3."""
    return model_dirs("qwen3")


@pytest.fixture
def tiny_model():
    """The same Qwen3 in transformers, free to be trained by the test."""
    return inference_models.build("qwen3")


@pytest.fixture
def prompts():
    """Twelve random prompts of 3 to 20 tokens."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 21, (12,), generator=generator).tolist()
    return [torch.randint(8, 264, (n,), generator=generator).tolist() for n in lengths]

"""A real vLLM server, started once by `prl inference`, from the environment that `install.sh` makes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from padded_model import write_padded_tiny
from vllm_facts import MAX_MODEL_LEN

from prl.run_dir import RunDir

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))

READY_SECONDS = 900.0
REPO = Path(__file__).parents[2]


@dataclass
class VllmServer:
    """A running `prl inference`; `url` is its address without /v1. Its worker loads wrongly while `sabotage`
    says so (see site/sitecustomize.py)."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    sabotage: Path


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """Interpreter of the environment that has vLLM."""
    python = os.environ.get("PRL_VLLM_PYTHON")
    if not python:
        pytest.skip("PRL_VLLM_PYTHON is not set; tests/vllm/install.sh DIRECTORY makes its environment")
    assert Path(python).is_file(), f"PRL_VLLM_PYTHON={python}: no such file"
    return python


@pytest.fixture(scope="session")
def padded_tiny(tmp_path_factory) -> Path:
    """The tiny model in a form that vLLM serves on CPUs."""
    return write_padded_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def prl_environment() -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    for name in ("PRL_OUTPUT_DIR", "PYTHONDONTWRITEBYTECODE"):  # without bytecode each import takes minutes
        environment.pop(name, None)
    return environment


@pytest.fixture(scope="session")
def server(vllm_python, padded_tiny, prl_environment, tmp_path_factory) -> Iterator[VllmServer]:
    """The bundled tiny model on vLLM, with room for an adapter."""
    where = tmp_path_factory.mktemp("vllm")
    sabotage = where / "sabotage"
    site = str(Path(__file__).parent / "site")
    environment = {
        **prl_environment,
        "PYTHONPATH": os.pathsep.join([prl_environment["PYTHONPATH"], site]),
        "SABOTAGE": str(sabotage),
    }
    words = [
        *("inference", "inference=vllm", f"inference.python={vllm_python}", "inference.port=0"),
        f"model.path={padded_tiny}",
        *(f"inference.max_model_len={MAX_MODEL_LEN}", f"inference.ready_timeout={READY_SECONDS}"),
        *("inference.vllm.enable_lora=true", "inference.vllm.max_lora_rank=8", "inference.vllm.max_loras=1"),
        *("inference.vllm.max_num_seqs=64", "sync.fingerprint=full", "run.name=served"),
    ]
    process = subprocess.Popen([sys.executable, "-m", "prl", *words], cwd=where, env=environment)
    run = RunDir(where / "outputs" / "served")
    try:
        yield VllmServer(_address(run, process), process, run.logs / "inference.log", sabotage)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, "a server that is stopped ends well"


def _address(run: RunDir, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, (run.logs / "inference.log").read_text()[-3000:]
        if run.address_file("inference").exists():
            return run.wait_for_address_blocking("inference", 1.0)
        time.sleep(0.2)
    raise TimeoutError(f"vLLM was not ready within {READY_SECONDS:.0f} s")

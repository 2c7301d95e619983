"""Weights on GPUs: proofs equal those of CPUs, broadcasts over NCCL between two GPUs, in memory of one.

NCCL_NVLS_ENABLE=0 python -m pytest -m gpu tests/gpu/test_gpu_sync.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import gpu_sync_rank

from prl.sync.fingerprint import MODES, Fingerprinter, fingerprint

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
REPO = HERE.parents[1]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
SECONDS = 240
sys.path.insert(0, str(HERE.parent / "inference"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_finds_the_fingerprint_of_a_cpu(mode, dtype):
    named = {name: tensor.to(dtype) for name, tensor in gpu_sync_rank.weights(7, "cpu").items()}
    named["turned"] = torch.randn(200, 300).to(dtype).t()  # not contiguous, as fused weights are
    there = {name: tensor.cuda() for name, tensor in named.items()}
    assert fingerprint(there.items(), mode) == fingerprint(named.items(), mode)
    there["w1"][0] += 1
    assert fingerprint(there.items(), "full") != fingerprint(named.items(), "full")


def test_samples_of_a_gpu_outlive_the_buffer_they_came_in():
    buffer, prints = torch.ones(9000, device="cuda"), Fingerprinter()
    prints.add("a", buffer)
    buffer.zero_()
    assert prints.result() == fingerprint([("a", torch.ones(9000))])


@pytest.mark.parametrize("mode", MODES)
def test_what_vllm_serves_is_read_back_from_a_gpu(mode):
    import vllm_stand_ins as stand_ins

    from prl.inference.vllm_layout import Layout
    from prl.inference.vllm_proof import Received, ServedProof

    named = {name: tensor.cuda() for name, tensor in stand_ins.weights().items()}
    for rank in range(2):
        model = stand_ins.model({k: v.cpu() for k, v in named.items()}, rank, 2).cuda()
        proof = ServedProof(Layout(model, all_columns=mode == "full"), mode)
        for change in (False, True):
            model.model.norm.weight[1] += change
            received = Received(mode)
            assert len(list(received.watch(iter(named.items())))) == len(named)
            found = proof.result(received)
            assert (found["fingerprint"] == fingerprint(named.items(), mode)) is not change
            assert found["different"] == (["model.norm.weight"] if change else [])


def broadcast(tmp_path: Path, gpus: tuple[int, int]) -> tuple[list[dict], list[dict]]:
    """What trainer and worker saw, each on its GPU, in processes of their own."""
    paths = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "gpu_sync_rank.py"), role, str(tmp_path / "broadcasts"), str(gpu)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for role, gpu in zip(("trainer", "worker"), gpus, strict=True)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    sent, received = (json.loads(text.splitlines()[-1]) for text in said)
    return sent, received


@two_gpus
def test_two_gpus_broadcast_over_nccl(tmp_path):
    sent, received = broadcast(tmp_path, (0, 1))
    assert [seen["print"] for seen in received] == [seen["print"] for seen in sent]
    assert received[-1]["backend"] == "nccl"
    assert all(seen["where"] == ["cuda:1"] for seen in received)
    assert len({seen["print"] for seen in sent}) == gpu_sync_rank.ROUNDS


def test_two_processes_of_one_gpu_share_its_memory(tmp_path):
    sent, received = broadcast(tmp_path, (0, 0))
    assert [seen["print"] for seen in received] == [seen["print"] for seen in sent]
    assert received[-1]["backend"] == "shared_gpu"
    assert all(seen["where"] == ["cuda:0"] for seen in received)
    assert len({seen["print"] for seen in sent}) == gpu_sync_rank.ROUNDS

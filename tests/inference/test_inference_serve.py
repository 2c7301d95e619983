"""`prl inference` from placement to a served request, and the engines that it places."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from launchers.placement import assign_devices, place
from launchers.serve import UntilStopped
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors
from prl.run_dir import RunDir


def compose(command, *words):
    return compose_job(command, list(words))


def placed(*words, gpus=()):
    config = compose("inference", *words)
    return {role.name: role for role in place("inference", config, Path("/r.yaml"), list(gpus))}


def test_one_engine_needs_no_router():
    roles = placed()
    assert list(roles) == ["inference"] and roles["inference"].kind == "server"


def test_replicas_come_with_a_router_before_them():
    roles = placed("inference.replicas=2", gpus=["4", "5"])
    assert {name: role.devices for name, role in roles.items()} == {
        "inference/0": ("4",),
        "inference/1": ("5",),
        "inference": (),
    }


def test_gpus_for_inference_become_replicas_of_the_engines_size(tmp_path):
    python = f"inference.python={sys.executable}"
    words = ("inference=vllm", python, "inference.tensor_parallel_size=2", "cluster.infer_gpus=4")
    roles = placed(*words, gpus=["0", "1", "2", "3"])
    assert roles["inference/0"].devices == ("0", "1") and roles["inference/1"].devices == ("2", "3")
    assert roles["inference/0"].argv[0] == sys.executable
    assert str(Path(__file__).parents[2]) in roles["inference/0"].env["PYTHONPATH"].split(os.pathsep)


def test_engines_of_several_gpus_beside_trainers():
    assert assign_devices(["engine", "trainer", None], ["0", "1", "2"], [2, 1, 1]) == [("0", "1"), ("2",), ()]
    assert assign_devices(["engine", "trainer"], ["0", "1"], [2, 1]) == [("0", "1"), ("0",)]
    with pytest.raises(ValueError, match="tensor_parallel_size = 4: only 2 GPUs"):
        assign_devices(["engine"], ["0", "1"], [4])


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (["inference=external", "inference.base_url=http://h/v1"], ["nothing to start"]),
        (["inference=vllm", "inference.python=/no/such/python"], ["no such interpreter"]),
        (["inference=vllm", "inference.python=/bin/sh", "inference.vllm.port=3"], ["Set inference.port"]),
        (["inference=vllm", "inference.python=/bin/sh", "inference.vllm.middleware=x"], ["Leave it out"]),
        (["inference=vllm", "inference.python=/bin/sh", "cluster.infer_gpus=3"], []),
        (["cluster.infer_gpus=4", "inference.replicas=3"], ["makes 4", "Leave one of them out"]),
        (
            [
                *("inference=vllm", "inference.python=/bin/sh", "cluster.infer_gpus=3"),
                "inference.tensor_parallel_size=2",
            ],
            ["not a multiple", "Nearest: 2"],
        ),
    ],
)
def test_refusals_name_the_remedy(words, reasons):
    if not reasons:
        assert compose("inference", *words).cluster.infer_gpus == 3
        return
    with pytest.raises(ConfigErrors) as refused:
        compose("inference", *words)
    assert all(reason in str(refused.value) for reason in reasons), refused.value


def test_without_vllm_the_choice_is_refused_with_the_remedy(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest)
    )
    with pytest.raises(ConfigErrors, match="Install the extra `gpu` or `cpu-vllm`"):
        compose("rl", "inference=vllm")


def test_a_broadcast_to_another_machine_is_refused():
    words = ["inference=external", "sync=collective"]
    with pytest.raises(ConfigErrors, match=r"Choose sync=filesystem"):
        compose("rl", *words, "inference.base_url=http://far:8000/v1")
    assert compose("rl", *words, "inference.base_url=http://127.0.0.1:8000/v1").sync.name == "collective"


def test_a_server_has_no_end_of_its_own():
    assert UntilStopped().verdict() is None and not UntilStopped().finished()


@pytest.mark.e2e
def test_two_replicas_behind_one_address_until_stopped(tmp_path):
    """The whole command: engines, router, printed address, a request, a clean end without leftovers."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = ["inference.replicas=2", "inference.port=0", "run.name=served", f"output_dir={tmp_path}"]
    command = [sys.executable, "-m", "prl", "inference", *words]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    run = RunDir(tmp_path / "served")
    try:
        url = wait_for_address(run, process)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as response:
            assert json.load(response)["data"][0]["id"] == "tiny"
        for session in ("a", "b", "a"):
            body = {"token_ids": [4, 20], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
            request = urllib.request.Request(
                f"{url}/inference/v1/generate", json.dumps(body).encode(), {"X-Session-ID": session}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert len(json.load(response)["choices"][0]["token_ids"]) == 3
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
            text = response.read().decode()
        counted = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total{")]
        assert sorted(float(line.rsplit(" ", 1)[1]) for line in counted) == [3.0, 6.0]
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"serving tiny on {url}/v1" in output


def wait_for_address(run, process):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None
        if run.address_file("inference").exists():
            return run.wait_for_address_blocking("inference", 1.0)
        time.sleep(0.1)
    raise TimeoutError("no address")

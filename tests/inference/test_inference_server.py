"""The engine as a process: start, address, signals, death, roles."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from prl.config.algo import GrpoConfig, OpdConfig
from prl.config.load import dump_resolved
from prl.config.loss import IpoConfig
from prl.config.schema import RlConfig
from prl.config.serving import EmbeddedConfig, ExternalConfig, TrackingConfig
from prl.config.sources import EnvConfig
from prl.config.training import AdamWConfig, ModelConfig, SchedulerConfig
from prl.inference.sampling_params import SamplingParams
from prl.inference.server import build_sampler, served_model
from prl.run_dir import RunDir

START = """
import sys
from pathlib import Path
from prl.config.load import load_resolved
from prl.run_dir import RunDir
from prl.inference import server
resolved = Path(sys.argv[2])
{extra}
server.main(load_resolved(resolved)[1], RunDir.from_resolved(resolved), sys.argv[1])
"""

DIES_ON_GENERATE = "from prl.inference.sampler import Sampler; Sampler.step = lambda self: 1 / 0"


def config(directory, **changes):
    return RlConfig(
        algo=changes.pop("algo", GrpoConfig()),
        loss=IpoConfig(),
        model=ModelConfig(name="tiny", path=str(directory), **changes.pop("model", {})),
        env=changes.pop("env", {}),
        optim=AdamWConfig(),
        scheduler=SchedulerConfig(),
        inference=EmbeddedConfig(max_slots=4, max_model_len=64, **changes.pop("inference", {})),
        tracking=TrackingConfig(),
        **changes,
    )


class Process:
    """A role in a process of its own."""

    def __init__(self, run_path, settings, role="inference", extra=""):
        self.run, self.role = RunDir(run_path), role
        self.run.resolved_config.parent.mkdir(parents=True)
        self.run.resolved_config.write_text(dump_resolved("rl", settings))
        command = [sys.executable, "-c", START.format(extra=extra), role, str(self.run.resolved_config)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = self._address()

    def _address(self):
        """What the process publishes; its last words if it ends before."""
        while self.process.poll() is None:
            with contextlib.suppress(TimeoutError):
                return self.run.wait_for_address_blocking(self.role, 0.2)
        raise AssertionError(self.process.stderr.read())

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return json.load(response)

    def post(self, path, body):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def end(self):
        """Exit status and seconds after SIGTERM."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(20)
        return status, time.monotonic() - started


def test_a_policy_engine_from_start_to_sigterm(tiny_dir, tmp_path):
    """Serves on the published address, and ends at once with a paused request in flight."""
    server = Process(tmp_path / "run", config(tiny_dir))
    assert server.url.startswith("http://127.0.0.1:")
    assert server.get("/v1/models")["data"][0]["id"] == "tiny"
    answer = server.post(
        "/inference/v1/generate", {"token_ids": [4, 20], "sampling_params": {"max_tokens": 3}}
    )
    assert answer["choices"][0]["token_ids"]
    server.post("/pause", {})

    def left_behind():
        with pytest.raises((OSError, ValueError)):
            server.post("/inference/v1/generate", {"token_ids": [4, 20]})

    waiting = threading.Thread(target=left_behind)
    waiting.start()
    time.sleep(0.3)
    status, seconds = server.end()
    waiting.join(5)
    assert status == 0, server.process.stderr.read()
    assert seconds < 5.0  # well below one on an idle machine
    assert not waiting.is_alive()


def test_a_teacher_serves_its_own_frozen_model(tiny_dir, model_dirs, tmp_path):
    algo = OpdConfig()
    algo.teacher.model = str(model_dirs("llama"))
    settings = config(tiny_dir, algo=algo, model={"num_layers": 1}, inference={"port": 1})
    server = Process(tmp_path / "run", settings, "teacher/shared")
    try:
        assert server.get("/v1/models")["data"][0]["id"] == algo.teacher.model
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/update_weights", {"weight_dir": str(tiny_dir), "version": 1})
        assert refused.value.code == 400
    finally:
        assert server.end()[0] == 0


def test_a_dead_sampler_ends_the_process(tiny_dir, tmp_path):
    server = Process(tmp_path / "run", config(tiny_dir), extra=DIES_ON_GENERATE)
    with pytest.raises(OSError):
        server.post("/inference/v1/generate", {"token_ids": [4, 20]})
    assert server.process.wait(20) != 0
    assert "ZeroDivisionError" in server.process.stderr.read()


def test_the_role_tells_which_model(tiny_dir):
    own = OpdConfig()
    own.teacher.model = "tiny"
    shared = OpdConfig()
    shared.teacher.model = str(tiny_dir)
    settings = config(tiny_dir, algo=shared, env={"maths": EnvConfig(algo=own)})
    assert served_model(settings, "inference") == settings.model
    assert served_model(settings, "teacher/maths") == ModelConfig(name="tiny", path=None)
    assert served_model(settings, "teacher/shared") == ModelConfig(name=str(tiny_dir), path=str(tiny_dir))
    shared.teacher.model = None
    with pytest.raises(ValueError, match=r"teacher/shared: algo\.teacher\.model is null"):
        served_model(settings, "teacher/shared")


def test_the_sampler_is_built_as_configured(tiny_dir):
    settings = config(tiny_dir, model={"num_layers": 1}, seed=5)
    sampler = build_sampler(settings, settings.model, tiny_dir)
    assert sampler.model.config.num_layers == 1
    assert (sampler.slots.size, sampler.max_length) == (4, 64)


def test_a_teacher_beside_an_external_engine_is_embedded(tiny_dir):
    settings = config(tiny_dir)
    settings.inference = ExternalConfig(base_url="http://elsewhere/v1", max_model_len=32)
    sampler = build_sampler(settings, ModelConfig(name="teacher"), tiny_dir)
    assert sampler.max_length == 32


def test_the_engines_seed_is_the_runs_unless_it_has_one(tiny_dir):
    def first_draw(**changes):
        settings = config(tiny_dir, **changes)
        sampler = build_sampler(settings, settings.model, tiny_dir)
        sampler.slots.add([sampler.make_request([4, 20], SamplingParams())])
        return sampler.slots.uniforms.item()

    assert first_draw(seed=5) == first_draw(seed=5) == first_draw(seed=1, inference={"seed": 5})
    assert first_draw(seed=5) != first_draw(seed=6)

"""How prl's settings become vLLM's command line, with a parser that stands for vLLM's."""

import argparse
import os
from types import SimpleNamespace

import pytest

from prl.config.algo import OpdConfig
from prl.config.schema import InferenceJobConfig, RlConfig
from prl.config.serving import CollectiveConfig, VllmConfig
from prl.config.training import ModelConfig, TrainerConfig
from prl.inference import roles, vllm_server
from prl.inference.vllm_server import parse, vllm_options


def job(**engine):
    return InferenceJobConfig(model=ModelConfig(name="m"), inference=VllmConfig(**engine), seed=3)


def rl(**changes):
    fields = {"algo": OpdConfig(), "loss": None, "optim": None, "scheduler": None, "tracking": None}
    fields |= {"curriculum": None, "inference": VllmConfig(port=8000)}
    return RlConfig(**{**fields, **changes})


def options(config, role="inference", on_gpu=False, model=None):
    return vllm_options(config, role, model or ModelConfig(name="m"), "/models/m", on_gpu)


def test_sampling_is_what_was_asked_and_logprobs_are_of_it():
    made = options(job())
    assert made["generation_config"] == "vllm"
    assert made["logprobs_mode"] == "processed_logprobs"
    assert made["served_model_name"] == ["m"] and made["model"] == "/models/m"
    assert made["seed"] == 3 and options(job(seed=9))["seed"] == 9
    assert made["worker_extension_cls"] == "prl.inference.vllm_worker.WorkerExtension"
    assert made["middleware"] == ["prl.inference.vllm_admin.AdminMiddleware"]


def test_the_named_classes_exist():
    from prl.import_path import load_object

    for name in (options(job())["worker_extension_cls"], *options(job())["middleware"]):
        module, _, attribute = name.rpartition(".")
        assert load_object(f"{module}:{attribute}", "vllm") is not None


def test_what_the_user_asks_for_wins():
    made = options(job(vllm={"max_num_seqs": 7, "generation_config": "auto"}))
    assert made["max_num_seqs"] == 7 and made["generation_config"] == "auto"


def test_gpus_and_cpus_differ():
    on_gpu = options(job(tensor_parallel_size=2, gpu_memory_utilization=0.5), on_gpu=True)
    assert (on_gpu["tensor_parallel_size"], on_gpu["gpu_memory_utilization"]) == (2, 0.5)
    assert on_gpu["dtype"] == "bfloat16" and "enforce_eager" not in on_gpu
    on_cpu = options(job())
    assert on_cpu["dtype"] == "float32" and on_cpu["enforce_eager"] is True
    assert "gpu_memory_utilization" not in on_cpu


def test_the_type_is_the_trainers():
    assert options(rl(trainer=TrainerConfig(dtype="bfloat16")))["dtype"] == "bfloat16"
    assert options(rl(), on_gpu=True)["dtype"] == "bfloat16"
    named = job()
    named.dtype = "float32"
    assert options(named, on_gpu=True)["dtype"] == "float32"


def test_plumbing_settings_of_the_model():
    made = options(job(), model=ModelConfig(name="m", random_init=True, num_layers=3))
    assert made["load_format"] == "dummy" and made["hf_overrides"] == {"num_hidden_layers": 3}


def test_room_for_the_adapter_that_a_run_trains():
    config = rl()
    config.lora = SimpleNamespace(rank=12, publish="adapter")
    assert options(config)["max_lora_rank"] == 16 and options(config)["enable_lora"] is True
    assert "enable_lora" not in options(config, role="teacher/shared")
    config.lora = SimpleNamespace(rank=12, publish="merged")
    assert "enable_lora" not in options(config)
    assert "enable_lora" not in options(rl())


def parser():
    made = argparse.ArgumentParser()
    for flag in ("--model", "--port", "--seed", "--chat-template"):
        made.add_argument(flag)
    made.add_argument("--served-model-name", nargs="+")
    made.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
    made.add_argument("--enable-lora", action=argparse.BooleanOptionalAction)
    made.add_argument("--compilation-config")
    return made


def test_options_become_a_command_line():
    made = parse(
        parser(),
        {
            "model": "a b",
            "port": 0,
            "chat_template": None,
            "served_model_name": ["x", "y"],
            "enforce_eager": True,
            "enable_lora": False,
            "compilation_config": {"level": 0, "sizes": [1]},
        },
    )
    assert (made.model, made.port, made.chat_template) == ("a b", "0", None)
    assert made.served_model_name == ["x", "y"]
    assert (made.enforce_eager, made.enable_lora) == (True, False)
    assert made.compilation_config == '{"level": 0, "sizes": [1]}'


def test_an_option_that_this_vllm_lacks_is_named():
    with pytest.raises(ValueError, match=r"inference\.vllm\.max_sprouts: this vLLM has no such option"):
        parse(parser(), {"model": "m", "max_sprouts": 3})


def test_an_environment_without_vllm_is_told(monkeypatch):
    monkeypatch.setattr(vllm_server, "SERVERS", (("vllm.absent", "vllm.absent.too"),))
    with pytest.raises(ValueError, match=r"inference=vllm: .*(has no vLLM|no place that prl knows)"):
        vllm_server._modules()


def test_variables_of_the_user_win(monkeypatch):
    monkeypatch.setattr(os, "environ", {"VLLM_NO_USAGE_STATS": "0"})
    vllm_server.prepare_environment(VllmConfig(env={"VLLM_CPU_KVCACHE_SPACE": "9"}), on_gpu=False)
    assert os.environ["VLLM_NO_USAGE_STATS"] == "0"
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "9"
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"
    monkeypatch.setattr(os, "environ", {})
    vllm_server.prepare_environment(VllmConfig(), on_gpu=True)
    assert "TORCH_COMPILE_DISABLE" not in os.environ


@pytest.mark.parametrize(
    ("role", "port"),
    [("inference", 8000), ("inference/0", 8100), ("inference/3", 8103), ("teacher/shared", 0)],
)
def test_ports_of_the_roles(role, port):
    assert roles.engine_port(rl(), role) == port
    assert roles.engine_port(rl(inference=VllmConfig(port=0)), role) == 0


def test_how_many_engines_serve():
    assert roles.replicas(rl()) == 1
    config = rl(inference=VllmConfig(tensor_parallel_size=2))
    config.cluster.infer_gpus = 8
    assert roles.replicas(config) == 4
    assert roles.replicas(rl(inference=VllmConfig(replicas=3))) == 3


def test_how_much_of_a_tensor_is_proven():
    assert roles.fingerprint_mode(rl(sync=CollectiveConfig(fingerprint="full"))) == "full"
    assert roles.fingerprint_mode(object()) == "sampled"

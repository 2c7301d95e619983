"""What a file means where it is silent: the format's defaults, wherever prl's own differ.

Without this, values of the option that prl happens to start from (its demonstration model's recipe) would
decide. What cannot be had in prl is told, as `unsaid`.
"""

from __future__ import annotations

from prl.import_toml.translation import Translation

MODEL = "Qwen/Qwen3-0.6B"
EVAL_MODEL = "deepseek/deepseek-v4.1-flash"
ENGINE_KEY = "VLLM_API_KEY"
EVAL_KEY = "PRIME_API_KEY"
READY_SECONDS = 1800.0
TRANSFER_SECONDS = 1200.0
FAILED_JOB_SECONDS = 3600.0


def of_rl(notes: Translation) -> None:
    """An `rl` file. Its engine holds what the trainer's rows hold."""
    notes.choices["recipe/rl"] = "null"
    values = {
        "max_steps": None,
        "rollout.group_size": 1,
        "rollout.batch_size": 128,
        "rollout.max_inflight": 1024,
        "trainer.seq_len": 2048,
    }
    _defaults(notes, values)
    training(notes)
    engine(notes)
    notes.default("inference.max_model_len", notes.values["trainer.seq_len"])
    starts_engine = notes.choices["inference"] != "external"
    if "sync" not in notes.choices:
        adapters = bool(notes.values.get("lora.rank"))
        notes.choose("sync", "collective" if starts_engine and not adapters else "filesystem", "")
    notes.default("sync.timeout", TRANSFER_SECONDS)
    if notes.values.get("cluster.train_nodes"):
        notes.default("cluster.failure_grace", FAILED_JOB_SECONDS)


def of_sft(notes: Translation) -> None:
    """An `sft` file. Its data says how long rows are."""
    notes.choices["recipe/sft"] = "null"
    _defaults(notes, {"max_steps": None, "data.batch_size": 128, "trainer.seq_len": 128})
    training(notes)
    if "eval.interval" in notes.values or any(key.startswith("eval.env.") for key in notes.values):
        engine(notes)
        notes.default("inference.max_model_len", max(2048, notes.values["trainer.seq_len"]))


def of_eval(notes: Translation) -> None:
    """An `eval` file. The format's endpoint is a hosted service, which prl does not name for you."""
    _defaults(notes, {"model.name": EVAL_MODEL, "client.api_key_var": EVAL_KEY, "concurrency": 128})


def training(notes: Translation) -> None:
    """Model and memory: whole layers are computed again, and what can be is kept in host memory."""
    _defaults(notes, {"model.name": MODEL, "model.teacher": None})
    notes.default("trainer.compile", True)
    notes.default("trainer.recompute", "full")
    again = notes.values["trainer.recompute"]
    apart = again == "selective" and notes.values["trainer.compile"]
    if apart and "trainer.offload_activations" not in notes.values:
        notes.unsaid["ac_offloading"] = (
            "off: trainer.recompute=selective cannot move tensors of compiled layers"
        )
    notes.default("trainer.offload_activations", again != "none" and not apart)
    on_device = notes.choices.get("optim") == "muon"
    if on_device and "zero.offload_optimizer" not in notes.values:
        notes.unsaid["optim_cpu_offload"] = "off: optim=muon orthogonalises on the device"
    notes.default("zero.offload_optimizer", not on_device)


def engine(notes: Translation) -> None:
    """How long an engine may take, and the key of one that runs already."""
    notes.default("inference.ready_timeout", READY_SECONDS)
    if notes.choices["inference"] == "external":
        notes.default("inference.base_url", "http://localhost:8000/v1")
        notes.default("inference.api_key_var", ENGINE_KEY)


def _defaults(notes: Translation, values: dict[str, object]) -> None:
    for key, value in values.items():
        notes.default(key, value)

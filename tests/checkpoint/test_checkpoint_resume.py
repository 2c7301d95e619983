"""Save and load of real DeepSpeed engines on one and two ranks: three programs of many phases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import spawn, tiny_model
from transformers import AutoModelForCausalLM

from prl.checkpoint.export import export
from prl.checkpoint.marker import mark_complete
from prl.checkpoint.reader import CheckpointReader

ADAMW = ["AdamWConfig", {"lr": 1e-2, "betas": [0.9, 0.95]}]
SGD = ["SgdConfig", {"lr": 1e-2}]
MUON = ["MuonConfig", {"lr": 1e-2}]
SIGN = ["SignSgdConfig", {"lr": 1e-3}]

SAME_LAYOUT = {
    "zero-0": {"zero": {"stage": 0}},
    "zero-1": {"zero": {"stage": 1}},
    "zero-2": {"zero": {"stage": 2}},
    "zero-3": {"zero": {"stage": 3}},
    "bfloat16-1": {"zero": {"stage": 1}, "dtype": "bfloat16"},
    "bfloat16-3": {"zero": {"stage": 3}, "dtype": "bfloat16", "tied": False},
    "sgd-2": {"zero": {"stage": 2}, "optim": SGD},
    "sign_sgd-3": {"zero": {"stage": 3}, "optim": SIGN},
    "muon-1": {"zero": {"stage": 1}, "optim": MUON},
    "muon-3": {"zero": {"stage": 3}, "optim": MUON},
    "offload-3": {"zero": {"stage": 3, "offload_optimizer": True, "offload_parameters": True}},
    "groups-1": {"plain": True, "zero": {"stage": 1}},
    # hpZ leaves a process group behind that later engines of the process would use: it comes last.
    "groups-3": {"plain": True, "zero": {"stage": 3, "sub_group_size": 500, "zero_hpz_partition_size": 2}},
}

FROM_TWO_TO_ONE = {
    "zero-3 to 0": ("zero-3", {"zero": {"stage": 0}}),
    "zero-1 to 3": ("zero-1", {"zero": {"stage": 3}}),
    "zero-0 to 1": ("zero-0", {"zero": {"stage": 1}}),
    "offload-3 to 2": ("offload-3", {"zero": {"stage": 2}}),
    "muon-1 to 3": ("muon-1", {"zero": {"stage": 3}, "optim": MUON}),
    "groups-3 to 2": ("groups-3", {"plain": True, "zero": {"stage": 2}}),
}

FROM_ONE_TO_TWO = {
    "zero-2 to 3": ("one-2", {"zero": {"stage": 3, "param_persistence_threshold": 0}}),
    "zero-3 to 1": ("one-3", {"zero": {"stage": 1}}),
}

PUBLISHED = {"zero": {"stage": 3}, "dtype": "bfloat16", "tied": False}

SAVED_ON_ONE = {"one-2": {"zero": {"stage": 2}}, "one-3": {"zero": {"stage": 3}}}


def saving(directory: Path, cases: dict) -> list[dict]:
    return [{"do": "save", "path": str(directory / name / "trainer"), **case} for name, case in cases.items()]


def resuming(directory: Path, cases: dict) -> list[dict]:
    return [
        {"do": "resume", "path": str(directory / name / "trainer"), **case} for name, case in cases.values()
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Result of every phase by name: saved on one rank, all on two, changed layouts on one."""
    root = tmp_path_factory.mktemp("resume")
    spawn(1, saving(root, SAVED_ON_ONE), root / "first")

    phases, names = [], []
    for name, case in SAME_LAYOUT.items():
        path = str(root / name / "trainer")
        phases += [{"do": "save", "path": path, **case}, {"do": "resume", "path": path, **case}]
        names += [f"save {name}", name]
    before = ["published", *(f"up {name}" for name in FROM_ONE_TO_TWO)]
    publish = {"do": "publish", "path": str(root / "published" / "step_2" / "trainer"), **PUBLISHED}
    found = spawn(2, [publish, *resuming(root, FROM_ONE_TO_TWO), *phases], root / "second")
    collected = dict(zip(before + names, found, strict=True))

    adamw = {"do": "resume", "path": str(root / "zero-1" / "trainer"), "zero": {"stage": 1}}
    special = {
        "fresh optimizer": adamw | {"ckpt": {"skip_optimizer": True}},
        "no progress": adamw | {"ckpt": {"skip_progress": True}},
        "changed lr": adamw | {"optim": ["AdamWConfig", {"lr": 2e-2, "betas": [0.9, 0.95]}]},
        "other optimizer": adamw | {"do": "refused", "optim": SGD},
        "other model": adamw | {"do": "refused", "tied": False},
        "random": {"do": "random", "zero": {"stage": 2}, "path": str(root / "random" / "trainer")},
    }
    down = [f"down {name}" for name in FROM_TWO_TO_ONE]
    found = spawn(1, resuming(root, FROM_TWO_TO_ONE) + list(special.values()), root / "third")
    collected |= dict(zip(down + list(special), found, strict=True))
    return {"root": root, **collected}


@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_the_same_layout_continues_bitwise(results, name):
    found = results[name]
    assert found["different"] == []
    assert found["same_losses"], found["error"]
    assert found["extra"] == {"tokens": 128}
    assert found["counters"] == [2, 4]


def test_losses_depend_on_the_optimizer(results):
    """The bitwise losses mean something: optimizers differ from the third step on, and a fresh one shows."""
    after = [results[f"save {name}"]["after"][1] for name in ("zero-1", "sgd-2", "sign_sgd-3", "muon-1")]
    assert len(set(after)) == 4
    assert results["fresh optimizer"]["error"] > 1e-4


@pytest.mark.parametrize("name", FROM_ONE_TO_TWO)
def test_more_ranks_have_the_same_weights(results, name):
    found = results[f"up {name}"]
    assert found["different"] == []
    assert found["error"] < 5e-6


@pytest.mark.parametrize("name", FROM_TWO_TO_ONE)
def test_fewer_ranks_have_the_same_weights(results, name):
    found = results[f"down {name}"]
    assert found["different"] == []
    assert found["error"] < 5e-6


def test_skip_flags(results):
    assert results["fresh optimizer"]["counters"] == [2, 4]
    assert results["no progress"]["counters"] == [0, 0]
    assert results["no progress"]["different"] == []
    assert results["no progress"]["error"] < 5e-6


def test_a_changed_learning_rate_is_honoured(results):
    """State is the checkpoint's, hyper-parameters are the config's."""
    assert results["changed lr"]["different"] == []
    assert results["changed lr"]["error"] > 1e-4


def test_random_state(results):
    assert results["random"] == {"restored": True, "skipped": True}


def test_another_optimizer_is_refused(results):
    message = "the checkpoint is of optimizer AdamW with 1 parameter groups, the run's is DecoupledSgd"
    assert message in results["other optimizer"]
    assert "ckpt.skip_optimizer=true" in results["other optimizer"]


def test_another_model_is_refused(results):
    assert "is a checkpoint of another model: model.lm_head.weight is missing" in results["other model"]


def test_an_export_has_the_weights_that_the_engine_published(results):
    """bfloat16 from float32 masters, several files, two ranks at stage 3: bitwise what engines were sent."""
    step = results["root"] / "published" / "step_2"
    mark_complete(step, ["trainer"])
    config = step.parent / "model"
    tiny_model(seed=0, tied=False).config.save_pretrained(config)
    out = step.parent / "out"
    assert export(step, out, torch.bfloat16, 4000, config).num_files > 1
    published = torch.load(step / "trainer.weights")
    loaded = dict(AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).named_parameters())
    assert loaded.keys() == published.keys()
    assert all(torch.equal(loaded[name], published[name]) for name in published)


def test_files_of_a_checkpoint(results):
    expected = [".metadata", "__0_0.distcp", "__1_0.distcp", "rng", "trainer_state.json"]
    assert results["save zero-3"]["files"] == expected
    directory = results["root"] / "zero-3" / "trainer"
    assert sorted(f.name for f in (directory / "rng").iterdir()) == ["rank_0.json", "rank_1.json"]
    state = json.loads((directory / "trainer_state.json").read_text())
    assert (state["zero_stage"], state["world_size"]) == (3, 2)
    assert state["optimizer"]["class"] == "AdamW"
    assert state["optimizer"]["groups"][0]["peak_lr"] == 1e-2
    assert state["scalars"]["model.norm.weight"] == {"step": {"dtype": "float32", "value": 2.0}}


def test_names_on_disk_are_plain_and_tied_weights_come_once(results):
    tensors = CheckpointReader(results["root"] / "zero-3" / "trainer").tensors
    assert "model.model.embed_tokens.weight" in tensors
    assert "model.lm_head.weight" not in tensors
    assert tuple(tensors["optim.exp_avg_sq.model.layers.1.mlp.up_proj.weight"].size) == (27, 20)
    kinds = {
        name.split(".")[0] if name.startswith("model") else ".".join(name.split(".")[:2]) for name in tensors
    }
    assert kinds == {"model", "optim.exp_avg", "optim.exp_avg_sq"}
    stateless = CheckpointReader(results["root"] / "sign_sgd-3" / "trainer").tensors
    assert all(name.startswith("model.") for name in stateless)
    untied = CheckpointReader(results["root"] / "bfloat16-3" / "trainer").tensors
    assert {str(e.properties.dtype) for e in untied.values()} == {"torch.float32"}
    assert "model.lm_head.weight" in untied
    frozen = CheckpointReader(results["root"] / "groups-1" / "trainer").tensors
    assert "model.model.layers.0.mlp.up_proj.weight" in frozen
    assert "optim.exp_avg.model.layers.0.mlp.up_proj.weight" not in frozen
    assert "model.steps_seen" in frozen

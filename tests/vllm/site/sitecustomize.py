"""On the Python path of the server of these tests: its workers load weights wrongly when they are told to.

What happens to loading is what a faulty loader would do; the proof of what is served is prl's own. The file
that SABOTAGE names says `skip` (nothing is loaded), `wrong` (one tensor is, upside down) or `head` (a head
tied to the embedding stays as it was).
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

VICTIM = "model.layers.1.self_attn.k_proj.weight"


def kind():
    file = Path(os.environ["SABOTAGE"])
    return file.read_text() if file.exists() else ""


def install(worker):
    load, repack = worker.load_in_place, worker._repack_heads

    def load_in_place(runner, tensors, device):
        if kind() == "skip":
            for _ in tensors:
                pass
            return
        turn = VICTIM if kind() == "wrong" else None
        load(runner, ((name, tensor.flip(0) if name == turn else tensor) for name, tensor in tensors), device)

    def repack_heads(model):
        if kind() != "head":
            repack(model)

    worker.load_in_place, worker._repack_heads = load_in_place, repack_heads


class Finder(importlib.abc.MetaPathFinder):
    """Changes prl's worker module as soon as it is imported."""

    def find_spec(self, name, path, target=None):
        if name != "prl.inference.vllm_worker":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            install(module)

        spec.loader.exec_module = exec_module
        return spec


if "SABOTAGE" in os.environ:
    sys.meta_path.insert(0, Finder())

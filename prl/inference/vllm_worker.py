"""What prl adds to vLLM's workers (`--worker-extension-cls`): they load, prove and receive weights.

The methods run in each worker process through `collective_rpc`. vLLM's own loader maps Hugging Face names to
its fused and sharded parameters; what it made of them is read back for the fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from prl.inference.vllm_adapter_layout import AdapterLayout
from prl.inference.vllm_direct import DirectWriter
from prl.inference.vllm_layout import Layout
from prl.inference.vllm_proof import Received, ServedProof
from prl.sync.collective import Broadcast
from prl.sync.group import Group, join
from prl.sync.offer import read_offer
from prl.sync.weight_files import ADAPTER_CONFIG, ADAPTER_FILE, WeightFiles


class WorkerExtension:
    """Methods of a worker; every attribute that is not defined here is vLLM's."""

    prl_group: Group | None = None
    prl_proof: ServedProof | None = None
    prl_writer: DirectWriter | None = None
    model_runner: Any
    device: torch.device
    rank: int

    def prl_ping(self) -> int:
        """The worker's rank: a round trip through the engine."""
        return self.rank

    def prl_join(
        self, host: str, port: int, session: str, first_rank: int, workers: int, timeout: float
    ) -> int:
        """Join the trainer's group as rank `first_rank` + own rank; that rank."""
        rank = first_rank + self.rank
        self.prl_group = join(host, port, session, rank, workers, timeout, self.device)
        return rank

    def prl_load(self, weight_dir: str, mode: str) -> dict[str, Any]:
        """Load the version that `weight_dir` describes; what `ServedProof.result` says of it then.

        Raises RuntimeError when the tensors do not cover the model: it is then partly loaded.
        """
        received = Received(mode)
        source = self._prl_source(Path(weight_dir))
        shapes = {name: spec.shape for name, spec in source.specs().items()}
        arriving = source.tensors(received.take) if isinstance(source, Broadcast) else source.tensors()
        tensors = received.watch(arriving)
        writer = self.prl_writer if self.prl_writer and self.prl_writer.takes(shapes) else None
        if writer:
            writer.write(tensors)
        else:
            load_in_place(self.model_runner, tensors, self.device)
        if self.prl_proof is None or self.prl_proof.mode != mode:
            layout = Layout(self.model_runner.get_model(), all_columns=mode == "full")
            self.prl_proof = ServedProof(layout, mode)
        found = self.prl_proof.result(received)
        if not writer or found["different"]:
            self.prl_writer = self._prl_learn(self.prl_proof, received.shapes, found)
        return found

    def prl_receive_adapter(self, weight_dir: str, into: str) -> None:
        """Receive an adapter by broadcast; the first worker writes it to `into` in PEFT's format."""
        source = self._prl_source(Path(weight_dir))
        assert isinstance(source, Broadcast)
        received = {name: tensor.to("cpu", copy=True) for name, tensor in source.tensors()}
        if self.rank == 0:
            write_adapter(Path(into), received, source.offer.adapter or {})

    def prl_prove_adapter(self, adapter_dir: str, adapter: int, mode: str) -> dict[str, Any]:
        """What `ServedProof.result` says of the adapter in `adapter_dir`, served as number `adapter`."""
        config = json.loads((Path(adapter_dir) / ADAPTER_CONFIG).read_text())
        runner = self.model_runner
        manager = runner.lora_manager._adapter_manager
        received = Received(mode)
        for _ in received.watch(WeightFiles(Path(adapter_dir)).tensors()):
            pass
        layout = AdapterLayout(runner.get_model(), manager, adapter, config)
        return ServedProof(layout, mode).result(received)

    def _prl_learn(
        self, proof: ServedProof, shapes: Mapping[str, tuple[int, ...]], found: dict[str, Any]
    ) -> DirectWriter | None:
        """A way past vLLM's loader, if each value that it loaded was found in its place."""
        shown = not found["different"] and not found["unproven"]
        if shown and _loads_directly(self.model_runner, self.device):
            return DirectWriter.learn(proof.layout, shapes)
        return None

    def _prl_source(self, directory: Path) -> WeightFiles | Broadcast:
        if offer := read_offer(directory):
            if self.prl_group is None:
                raise RuntimeError(f"{directory} is a broadcast, and this worker has joined no group")
            return Broadcast(directory, offer, self.prl_group)
        return WeightFiles(directory)


def load_in_place(runner: Any, tensors: Iterator[tuple[str, Tensor]], device: torch.device) -> None:
    """Give `tensors` to the model's loader.

    On GPUs plain weights are parameters as loaded, so the loader writes straight into them. Where vLLM
    repacks weights after loading (CPUs, quantised models, fused experts) its own reload does the whole way.
    """
    model = runner.get_model()
    if _loads_directly(runner, device):
        filled = model.load_weights(tensors)
        expected = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        missing = expected - {name.replace(".base_layer.", ".") for name in filled}
        if missing:
            raise RuntimeError(f"{len(missing)} parameters got no weights, {sorted(missing)[0]} among them")
    else:
        runner.reload_weights(weights_iterator=tensors)
        if device.type == "cpu":
            _repack_heads(model)
    if next(tensors, None) is not None:
        raise RuntimeError("vLLM's loader did not take all tensors")


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """An adapter as PEFT stores it."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / ADAPTER_FILE,
        metadata={"format": "pt"},
    )
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config))


def _repack_heads(model: torch.nn.Module) -> None:
    """A head tied to the embedding gets no weights of its own, so a reload leaves it computing with the
    packed copy that the CPU kernels made of the old ones."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


def _loads_directly(runner: Any, device: torch.device) -> bool:
    fused_experts = any("MoE" in type(module).__name__ for module in runner.get_model().modules())
    return device.type == "cuda" and runner.model_config.quantization is None and not fused_experts

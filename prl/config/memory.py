"""What a run needs of each device's memory, computed from the model's config.json alone.

Bytes per parameter follow the trainer's own layout (float32 gradients, float32 masters under ZeRO);
activations count what autograd keeps of a layer with fused attention, as Korthikanti et al. (2022) do.
Of peaks measured on H200s (0.6B and 4B, 8k to 64k tokens a row, compiled, with and without recomputation,
ZeRO 1 to 3, one and two ranks) the sum is within 3 %. An estimate for a verdict all the same: allocator
fragmentation and CUDA contexts come on top, for which `ROOM` is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from prl.checkpoint.experts import PARTS, STACKED
from prl.config.training import EXPERTS
from prl.inference.roles import replicas, served_model, weight_dtype
from prl.model_path import read_model_config, resolve_model_path

ROOM = 0.9
"""Share of a device that a run may fill by this estimate."""

GB = 1e9
UNITS = {"GB": GB, "MB": 1e6}
FLOAT32 = 4
WIDTHS = {"float32": FLOAT32, "bfloat16": 2}
"""Bytes of an element."""
HEAD_BLOCK = 8192
"""Columns of logits that the LM head holds at a time (`prl.trainer.lm_head.VOCAB_BLOCK`)."""
HEAD_BYTES_FUSED, HEAD_BYTES = 8, 20
"""Bytes for each logit of such a block: in the compiled kernels, and step by step without them."""
REDUCE_BUCKET = 500_000_000
"""Gradients that ZeRO 2 collects before it sends them; two buckets take turns."""
MOMENTS = {"adamw": 2, "sgd": 1, "muon": 1, "sign_sgd": 0}
"""Float32 values that an optimizer keeps for each parameter, beside the master copy."""


def reduced_together(layer: int) -> int:
    """Elements of gradients that ZeRO 3 sends in one piece, where the largest layer has `layer`."""
    return max(1 << 26, layer)


def left_gathered(layer: int) -> int:
    """Elements of gathered weights that ZeRO 3 may leave until they are used again."""
    return max(1_000_000_000, 3 * layer)


class Kept(NamedTuple):
    """Elements kept for backward, and those among what is recomputed that recomputation starts from."""

    always: float
    starts: float


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder-only transformer, counts of elements."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    experts: int
    active_experts: int
    stacked_experts: bool
    tied: bool
    head_norms: bool
    attention_bias: bool

    @property
    def projections(self) -> list[tuple[str, int, int]]:
        """(name, inputs, outputs) of the matrices of one layer, each expert's among them."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide, thin = self.feed_forward, self.hidden
        attention = [("q_proj", thin, queries), ("k_proj", thin, keys), ("v_proj", thin, keys)]
        attention.append(("o_proj", queries, thin))
        expert = [("gate_proj", thin, wide), ("up_proj", thin, wide), ("down_proj", wide, thin)]
        router = [("gate", thin, self.experts)] if self.experts else []
        return attention + expert * max(1, self.experts) + router

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        biases = (self.heads + 2 * self.kv_heads) * self.head_dim if self.attention_bias else 0
        return sum(rows * columns for _, rows, columns in self.projections) + norms + biases

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden

    def kv_bytes(self, width: int) -> int:
        """Bytes of one token's keys and values, elements of `width` bytes, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width

    def adapters(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of rank-`rank` adapters on the matrices of these names, each expert's by `EXPERTS`."""
        expert = PARTS if self.experts else ()
        named = set(targets).difference(expert)
        if EXPERTS in targets and self.stacked_experts:
            named.update(expert)
        sides = [rows + columns for name, rows, columns in self.projections if name in named]
        return self.layers * rank * sum(sides)

    def layer_activations(self, width: int, compiled: bool) -> tuple[float, float]:
        """Elements that one layer keeps of one token: (norms and attention, feed-forward part).

        As transformers writes the layer: each norm keeps its input in float32 (in bfloat16 these are two
        elements more), the normalised values and what it gives; queries and keys are kept as the attention
        kernel and its output have them, with a norm of their own three or two times more; the feed-forward
        part keeps both halves, the activation and the product. The compiler computes the cheap ones again.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = self.feed_forward * max(1, self.active_experts)
        if compiled:
            own = int(self.head_norms)
            return 4 * self.hidden + (2 + own) * queries + (2 + own) * keys, 3 * wide
        half = int(width < FLOAT32)
        own = (2 + half) if self.head_norms else 0
        return (6 + 2 * half) * self.hidden + (2 + own) * queries + (2 + own) * keys, 4 * wide

    def activations(self, tokens: int, recompute: str, width: int, compiled: bool = False) -> Kept:
        """Elements kept between forward and backward of one row of `tokens`."""
        attention, feed_forward = self.layer_activations(width, compiled)
        ends = 6 * self.hidden  # the last norm, and the gradient that walks back
        if recompute == "full":
            return Kept(tokens * (attention + feed_forward + ends), tokens * self.layers * self.hidden)
        if recompute == "selective":
            rest = self.layers * (attention - self.hidden) + feed_forward + ends
            return Kept(tokens * rest, tokens * self.layers * self.hidden)
        return Kept(tokens * (self.layers * (attention + feed_forward) + ends), 0)


@dataclass(frozen=True)
class Need:
    """Bytes of one process on its device, by what they hold; `host`: what was moved to host memory."""

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    buffers: float = 0
    kv: float = 0
    host: float = 0

    @property
    def device(self) -> float:
        return sum(astuple(self)[:6])


def read_sizes(directory: Path, num_layers: int | None = None) -> Sizes | None:
    """Sizes from `config.json`; None for a model that does not name them in the usual way."""
    told = read_model_config(directory)
    try:
        heads, hidden = told["num_attention_heads"], told["hidden_size"]
        experts = (
            told.get("num_experts") or told.get("num_local_experts") or told.get("n_routed_experts") or 0
        )
        wide = told.get("moe_intermediate_size") if experts else None
        return Sizes(
            vocabulary=told["vocab_size"],
            hidden=hidden,
            layers=num_layers or told["num_hidden_layers"],
            heads=heads,
            kv_heads=told.get("num_key_value_heads") or heads,
            head_dim=told.get("head_dim") or hidden // heads,
            feed_forward=wide or told["intermediate_size"],
            experts=experts,
            active_experts=told.get("num_experts_per_tok") or 0,
            stacked_experts=bool(experts) and told.get("model_type") in STACKED,
            tied=bool(told.get("tie_word_embeddings", False)),
            head_norms=str(told.get("model_type", "")).startswith("qwen3"),
            attention_bias=bool(told.get("attention_bias", told.get("model_type") == "qwen2")),
        )
    except KeyError:
        return None


def trainer_need(config: Any, sizes: Sizes, on_gpu: bool) -> Need:
    """Bytes of one trainer rank."""
    zero, ranks = config.zero, max(1, config.cluster.train_ranks)
    width = WIDTHS[weight_dtype(config, on_gpu)]
    stage = max(zero.stage, 1) if width < FLOAT32 else zero.stage
    whole = sizes.parameters
    lora = config.lora
    learned = sizes.adapters(lora.rank, lora.targets) if lora.rank else whole
    frozen = whole if lora.rank else 0
    shards = {
        part: ranks if stage >= at else 1 for part, at in (("optimizer", 1), ("gradients", 2), ("all", 3))
    }
    parameters = (frozen + learned) * width / shards["all"]
    masters = 1 if stage else 0
    optimizer = learned * FLOAT32 * (MOMENTS.get(config.optim.name, 2) + masters) / shards["optimizer"]
    compiled = config.trainer.compile
    chunk = min(config.trainer.lm_head_chunk or config.trainer.seq_len, config.trainer.seq_len)
    logits = chunk * min(sizes.vocabulary, HEAD_BLOCK) * (HEAD_BYTES_FUSED if compiled else HEAD_BYTES)
    micro = getattr(getattr(config, "data", None), "micro_batch_size", 1)
    tokens = config.trainer.seq_len * micro // config.trainer.sequence_parallel
    kept = sizes.activations(tokens, config.trainer.recompute, width, compiled)
    starts, start_moves = kept.starts * width, config.trainer.offload_activations and on_gpu
    moved = [
        (optimizer, zero.offload_optimizer),
        (parameters, zero.offload_parameters),
        (starts, start_moves),
    ]
    return Need(
        parameters=0 if zero.offload_parameters else parameters,
        gradients=learned * FLOAT32 / shards["gradients"],
        optimizer=0 if zero.offload_optimizer else optimizer,
        activations=kept.always * width + (0 if start_moves else starts) + logits,
        buffers=_buffers(sizes, stage, ranks, width, bool(lora.rank)) if on_gpu else 0,
        host=sum(size for size, away in moved if away),
    )


def _buffers(sizes: Sizes, stage: int, ranks: int, width: int, adapters: bool) -> float:
    """Bytes of what gradients are sent from, in float32, and of the weights that several ranks gather."""
    if stage < 2:
        return 0
    if stage == 2:
        alone = 0 if adapters else sizes.vocabulary * sizes.hidden  # too large for a bucket
        return 2 * REDUCE_BUCKET * width + alone * FLOAT32
    layer = sizes.layer_parameters
    gathered = min(sizes.parameters, left_gathered(layer)) if ranks > 1 else 0
    return reduced_together(layer) * FLOAT32 + gathered * width


def engine_need(config: Any, sizes: Sizes, on_gpu: bool, device_bytes: float | None) -> Need:
    """Bytes of one engine on each of its devices; vLLM fills its share of a device with KV."""
    engine = config.inference
    width = WIDTHS[weight_dtype(config, on_gpu)]
    devices = getattr(engine, "tensor_parallel_size", 1)
    weights = sizes.parameters * width / devices
    kv = sizes.kv_bytes(width) / devices * engine.max_model_len * getattr(engine, "max_slots", 1)
    share = getattr(engine, "gpu_memory_utilization", None)
    if share is not None and on_gpu and device_bytes is not None:
        kv = max(kv, share * device_bytes - weights)
    return Need(parameters=weights, kv=kv)


def memory_report(
    config: Any, roles: Sequence[Any], device_bytes: float | None, host_bytes: float | None
) -> str:
    """Table of what each placed process needs, and a verdict per device.

    `roles` have `name`, `devices` (CUDA ids, none on CPUs), `node`; `device_bytes` is the memory of one GPU,
    `host_bytes` that of one node; None where it is not known.
    """
    needs = {role.name: need for role in roles if (need := _need(config, role, device_bytes)) is not None}
    if not needs:
        return "memory: no estimate, the model's config.json does not name its sizes"
    unit = "GB" if max(need.device + need.host for need in needs.values()) >= GB else "MB"
    size = UNITS[unit]
    columns = ["parameters", "gradients", "optimizer", "activations", "buffers", "KV", "host", "sum"]
    lines = [_row(f"estimate, {unit}", columns)]
    for need, names in _alike(needs):
        label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        lines.append(_row(label, [f"{value / size:.2f}" for value in (*astuple(need), need.device)]))
    return "\n".join([*lines, *_verdicts(roles, needs, device_bytes, host_bytes)])


def _alike(table: Mapping[str, Any]) -> list[tuple[Any, list[str]]]:
    """(value, the keys that have it), in order."""
    found: dict[Any, list[str]] = {}
    for key, value in table.items():
        found.setdefault(value, []).append(key)
    return list(found.items())


def _verdicts(
    roles: Iterable[Any], needs: Mapping[str, Need], device_bytes: float | None, host_bytes: float | None
) -> list[str]:
    used: dict[str, float] = {}
    sizes: dict[str, float | None] = {}
    for role in roles:
        if (need := needs.get(role.name)) is None:
            continue
        shares = {f"GPU {device} of node {role.node}": (need.device, device_bytes) for device in role.devices}
        on_host = need.host + (0 if role.devices else need.device)
        for place, (share, size) in {**shares, f"host {role.node}": (on_host, host_bytes)}.items():
            used[place], sizes[place] = used.get(place, 0) + share, size
    told = {place: _verdict(taken, sizes[place]) for place, taken in used.items() if taken}
    return [f"{places[0]}{_more(places)}: {verdict}" for verdict, places in _alike(told)]


def _more(places: list[str]) -> str:
    return f" and {len(places) - 1} like it" if len(places) > 1 else ""


def _verdict(used: float, size: float | None) -> str:
    if size is None:
        return f"{used / GB:.2f} GB of a size that is not known here (see cluster.gpu_gb, cluster.mem_gb)"
    word = "fits" if used <= ROOM * size else "tight" if used <= size else "DOES NOT FIT"
    return f"{used / GB:.2f} of {size / GB:.2f} GB, {word}"


def _need(config: Any, role: Any, device_bytes: float | None) -> Need | None:
    """What a role needs; None for one that holds no weights."""
    first = role.name.partition("/")[0]
    on_gpu = bool(role.devices)
    if first in ("trainer", "sft"):
        sizes = _sizes_of(config.model)
        return trainer_need(config, sizes, on_gpu) if sizes else None
    router = role.name == "inference" and replicas(config) > 1
    if first not in ("inference", "teacher") or router:
        return None
    sizes = _sizes_of(served_model(config, role.name))
    return engine_need(config, sizes, on_gpu, device_bytes) if sizes else None


def _sizes_of(model: Any) -> Sizes | None:
    try:
        directory = resolve_model_path(model)
    except ValueError:
        return None  # the rule about the model has told, or an endpoint knows the name
    return read_sizes(directory, model.num_layers)


def _row(name: str, cells: list[str]) -> str:
    return f"{name:26}" + "".join(f"{cell:>12}" for cell in cells)

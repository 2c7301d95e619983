"""Where the tensors of a Hugging Face model lie in what a vLLM worker computes with.

vLLM fuses projections, splits layers over ranks, pads the vocabulary, and packs weights for its CPU kernels
so that no parameter is left. The places follow from the model's `packed_modules_mapping` and from the sizes
that its layers state; nothing is asked of the loader, whose work they serve to check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PROBED_COLUMNS = 64
"""Columns of a packed weight that are read when not all are asked for."""
PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON")
"""Kernels that compute with experts as they were loaded; others want them swapped or shuffled."""

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class Block:
    """A rectangle of a tensor: the elements from `start` on, `shape` of them, as this worker holds it.

    `read()` gives them, or of its last dimension only `columns`. `computed`: they come out of the layer's own
    kernel, which does not tell zeros of different sign apart. `kept` makes of the tensor's elements, in the
    type that is served, what the worker keeps in their place.
    """

    read: Callable[[], Tensor]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    columns: Tensor | None = None
    computed: bool = False
    kept: Callable[[Tensor], Tensor] | None = None

    @property
    def place(self) -> tuple[slice, ...]:
        """The tensor indexed by it is the rectangle."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))


class Layout:
    """The places in one worker's model, found once. `all_columns`: read packed weights as a whole."""

    def __init__(self, model: nn.Module, *, all_columns: bool = False) -> None:
        # A layer that takes an adapter is wrapped, and comes after its wrapper.
        pairs = model.named_modules(remove_duplicate=False)
        self._model = model
        self._modules = {_unwrapped(name): module for name, module in pairs}
        self._all_columns = all_columns
        self._packed: dict[str, list[tuple[str, int]]] = {}
        for packed, parts in getattr(model, "packed_modules_mapping", {}).items():
            for number, part in enumerate(parts):
                self._packed.setdefault(part, []).append((packed, number))
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._prefixes: dict[str, str | None] = getattr(mapper, "orig_to_new_prefix", None) or {}
        self._found: dict[str, list[Block] | None] = {}
        self._probes: dict[int, Tensor] = {}

    def blocks(self, name: str, shape: tuple[int, ...]) -> list[Block] | None:
        """What this worker holds of a tensor: nothing if other workers do, None if that cannot be told."""
        if name not in self._found:
            self._found[name] = self._locate(name, shape)
        return self._found[name]

    def forget_probes(self) -> None:
        """Read packed weights anew from now on."""
        self._probes.clear()

    def uncovered(self, names: Iterable[str]) -> list[str]:
        """Parameters of the model that the tensors `names` leave without (all of) their weights."""
        given: dict[str, set[Any]] = {}
        for name in names:
            if expert := _EXPERT.fullmatch(name):
                for path, experts in self._stacks(expert[1]):
                    stack = "w2_weight" if expert[3] == "down_proj" else "w13_weight"
                    local = experts._map_global_expert_id_to_local_expert_id(int(expert[2]))
                    given.setdefault(f"{path}.{stack}", set()).add((expert[3], local))
            elif place := self.find(name):
                path, attribute, part = place
                given.setdefault(f"{path}.{attribute}", set()).add(part)
        wanted = {_unwrapped(name) for name, _ in self._model.named_parameters() if "lora_" not in name}
        return sorted(name for name in wanted if not self._complete(name, given.get(name, set())))

    def first_row(self, module: Any, part: int | None, rows: int) -> int:
        """Which row of a tensor of so many `rows` is the first that a linear layer holds on this rank."""
        return _rows(module, part, _packed_shape(module)[0], rows)[2]

    def _complete(self, name: str, parts: set[Any]) -> bool:
        """Whether a parameter was given all the parts that it is made of."""
        path, _, attribute = name.rpartition(".")
        if attribute in ("w13_weight", "w2_weight"):
            held = {part for part in parts if part[1] >= 0}
            return len(held) == getattr(self._modules[path], attribute).shape[0] * (
                2 if "13" in attribute else 1
            )
        leaf = path.rpartition(".")[2]
        count = sum(packed == leaf for places in self._packed.values() for packed, _ in places)
        return None in parts or (0 < count <= len(parts))

    def _locate(self, name: str, shape: tuple[int, ...]) -> list[Block] | None:
        if expert := _EXPERT.fullmatch(name):
            return self._expert(expert[1], int(expert[2]), expert[3], shape)
        place = self.find(name)
        if place is None:
            return None
        path, attribute, part = place
        module = self._modules[path]
        if not _is_plain(module):
            return None
        held = self._held(module, attribute, part, shape)
        copies = [self._packed_copy(reader, shape) for reader in self._readers(module, attribute)]
        return None if held is None else held + copies

    def find(self, name: str) -> tuple[str, str, int | None] | None:
        """(module, attribute, number of the part in a fused one) that a tensor belongs to."""
        whole, _, attribute = name.rpartition(".")
        for path in self._paths(whole):
            if hasattr(self._modules.get(path), attribute):
                return path, attribute, None
            parent, dot, leaf = path.rpartition(".")
            for packed, number in self._packed.get(leaf, ()):
                if hasattr(self._modules.get(parent + dot + packed), attribute):
                    return parent + dot + packed, attribute, number
        return None

    def _paths(self, path: str) -> Iterator[str]:
        yield path
        for old, new in self._prefixes.items():
            if new is not None and path.startswith(old):
                yield new + path[len(old) :]

    def _held(
        self, module: Any, attribute: str, part: int | None, shape: tuple[int, ...]
    ) -> list[Block] | None:
        """The block of one module, if it has any rows; None where the sizes do not say which it is."""
        parameter = getattr(module, attribute)
        is_packed = parameter.numel() == 0 and hasattr(module, "cpu_linear")
        local = _packed_shape(module) if is_packed else tuple(parameter.shape)
        if len(local) != len(shape) or not shape:
            return None
        first, count, start = _rows(module, part, local[0], shape[0])
        starts, sizes = [start], [count]
        for mine, whole in zip(local[1:], shape[1:], strict=True):
            starts.append(0 if mine == whole else module.tp_rank * mine)
            sizes.append(mine)
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        if first + count > local[0] or any(e > n for e, n in zip(ends, shape, strict=True)):
            return None
        columns = self._columns(local[-1]) if is_packed else None
        source = self._probe(module, columns) if is_packed else lambda: getattr(module, attribute).data
        rows = slice(first, first + count)
        block = Block(lambda: source()[rows], tuple(starts), tuple(sizes), columns, is_packed)
        return [block] if count else []

    def _readers(self, module: Any, attribute: str) -> list[Any]:
        """Modules that compute with a packed copy of a weight that also exists unpacked: CPU heads, tied to
        the embedding or not."""
        head = self._modules.get("lm_head")
        weight = getattr(module, attribute)
        tied = [head] if head is not None and getattr(head, attribute, None) is weight else []
        return [
            reader
            for reader in dict.fromkeys([module, *tied])
            if weight.numel() and attribute == "weight" and hasattr(reader, "cpu_linear")
        ]

    def _packed_copy(self, reader: Any, shape: tuple[int, ...]) -> Block:
        first, count, start = _rows(reader, None, *(reader.weight.shape[0], shape[0]))
        columns = self._columns(shape[1])
        source = self._probe(reader, columns)
        return Block(lambda: source()[first : first + count], (start, 0), (count, shape[1]), columns, True)

    def _columns(self, count: int) -> Tensor | None:
        return None if self._all_columns else torch.arange(0, count, -(-count // PROBED_COLUMNS))

    def _probe(self, module: Any, columns: Tensor | None) -> Callable[[], Tensor]:
        """Reads columns of a packed weight by multiplying it with unit vectors: each product has one term
        that is not zero, so it is exact."""

        def read() -> Tensor:
            if id(module) not in self._probes:
                count = _packed_shape(module)[1]
                chosen = torch.arange(count) if columns is None else columns
                units = torch.zeros(len(chosen), count, dtype=module.weight.dtype)
                units[torch.arange(len(chosen)), chosen] = 1
                with torch.inference_mode():
                    self._probes[id(module)] = module.cpu_linear(units, module.weight, None).t()
            return self._probes[id(module)]

        return read

    def _stacks(self, path: str) -> Iterator[tuple[str, Any]]:
        """(name, module) of the experts at a Hugging Face path: the module itself or one inside it."""
        for start in self._paths(path):
            for name, module in self._modules.items():
                if (name == start or name.startswith(f"{start}.")) and hasattr(module, "w13_weight"):
                    yield name, module

    def _expert(self, path: str, number: int, kind: str, shape: tuple[int, ...]) -> list[Block] | None:
        """One expert's projection, in the stacks of gate and up [experts, 2 * ffn, hidden], and of down."""
        experts = next((module for _, module in self._stacks(path)), None)
        method = getattr(experts, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        if experts is None or backend not in PLAIN_EXPERTS:
            return None
        local = experts._map_global_expert_id_to_local_expert_id(number)
        middle = experts.w2_weight.shape[-1]
        begin = experts.moe_config.tp_rank * middle
        if kind == "down_proj":
            start, size, stack, first = (0, begin), (shape[0], middle), "w2_weight", 0
        else:
            start, size, stack = (begin, 0), (middle, shape[1]), "w13_weight"
            first = middle if kind == "up_proj" else 0
        read = _expert_reader(experts, stack, local, slice(first, first + size[0]))
        return [] if local < 0 else [Block(read, start, size)]


def _expert_reader(experts: Any, stack: str, local: int, rows: slice) -> Callable[[], Tensor]:
    return lambda: getattr(experts, stack).data[local, rows]


def _unwrapped(name: str) -> str:
    return name.replace(".base_layer", "")


def _is_plain(module: Any) -> bool:
    """Whether a module keeps weights as values, not as codes with scales."""
    method = getattr(module, "quant_method", None)
    return method is None or type(method).__name__.startswith("Unquantized")


def _packed_shape(module: Any) -> tuple[int, int]:
    """[out, in] of a linear layer or a head on this rank, which no parameter tells any more."""
    if hasattr(module, "num_embeddings_per_partition"):
        return module.num_embeddings_per_partition, module.embedding_dim
    rows = getattr(module, "output_size_per_partition", None) or module.output_size
    return rows, getattr(module, "input_size_per_partition", None) or module.input_size


def _rows(module: Any, part: int | None, local: int, whole: int) -> tuple[int, int, int]:
    """(first row on this rank, number of rows, which row of the tensor the first one is)."""
    if hasattr(module, "shard_indices"):
        begin, end = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        return 0, end - begin, begin
    if part is None:
        return 0, local, 0 if local == whole else module.tp_rank * local
    rank = module.tp_rank
    if hasattr(module, "num_kv_head_replicas"):
        key, value = module.head_size, getattr(module, "v_head_size", module.head_size)
        sizes = [module.num_heads * key, module.num_kv_heads * key, module.num_kv_heads * value]
        rank = rank // module.num_kv_head_replicas if part else rank
    else:
        sizes = [size // module.tp_size for size in module.output_sizes]
    return sum(sizes[:part]), sizes[part], rank * sizes[part]

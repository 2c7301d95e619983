"""Layers with the attributes by which vLLM 0.24 and 0.32 say what they hold, for one rank of several.

A whole decoder's Hugging Face weights are dealt out to them here, by slices written down for this file alone.
"""

from types import SimpleNamespace

import torch
from torch import nn

HEADS, KV_HEADS, HEAD, V_HEAD, HIDDEN, FFN, VOCAB, PADDED, EXPERTS = 4, 2, 3, 3, 8, 12, 10, 16, 4


class UnquantizedLinearMethod:
    pass


class UnquantizedFusedMoEMethod:
    def __init__(self, backend):
        self.unquantized_backend = SimpleNamespace(name=backend)


class CodesMethod:
    """Of a layer whose weights are codes with scales."""


def parameter(tensor):
    return nn.Parameter(tensor.clone(), requires_grad=False)


def linear(weight, rank, ranks, **more):
    """A linear layer of this rank with [out, in] of its own."""
    layer = nn.Module()
    layer.weight = parameter(weight)
    layer.quant_method = UnquantizedLinearMethod()
    layer.tp_rank, layer.tp_size = rank, ranks
    layer.output_size_per_partition, layer.input_size_per_partition = weight.shape
    for name, value in more.items():
        setattr(layer, name, value)
    return layer


def part(tensor, rank, ranks, dim=0):
    return tensor.chunk(ranks, dim)[rank]


def weights(experts=False):
    """Name -> random tensor of a model of one layer."""
    random = torch.Generator().manual_seed(5)
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        f"{attention}q_proj.weight": (HEADS * HEAD, HIDDEN),
        f"{attention}k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        f"{attention}v_proj.weight": (KV_HEADS * V_HEAD, HIDDEN),
        f"{attention}q_proj.bias": (HEADS * HEAD,),
        f"{attention}k_proj.bias": (KV_HEADS * HEAD,),
        f"{attention}v_proj.bias": (KV_HEADS * V_HEAD,),
        f"{attention}o_proj.weight": (HIDDEN, HEADS * HEAD),
        f"{attention}q_norm.weight": (HEAD,),
        "model.norm.weight": (HIDDEN,),
    }
    if experts:
        for number in range(EXPERTS):
            shapes |= {
                f"{mlp}experts.{number}.gate_proj.weight": (FFN, HIDDEN),
                f"{mlp}experts.{number}.up_proj.weight": (FFN, HIDDEN),
                f"{mlp}experts.{number}.down_proj.weight": (HIDDEN, FFN),
            }
    else:
        shapes |= {
            f"{mlp}gate_proj.weight": (FFN, HIDDEN),
            f"{mlp}up_proj.weight": (FFN, HIDDEN),
            f"{mlp}down_proj.weight": (HIDDEN, FFN),
        }
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def model(named, rank=0, ranks=1, *, experts=False, backend="TRITON", whole=(0, 1)):
    """One rank's model, tied head included, holding its part of `named`. `whole`: (rank, ranks) over which
    experts are dealt out undivided."""
    root, attention, mlp = nn.Module(), nn.Module(), nn.Module()
    root.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    of = "model.layers.0.self_attn."
    replicas = max(1, ranks // KV_HEADS)
    kv_ranks = ranks // replicas

    def fused(kind):
        return torch.cat(
            [
                part(named[f"{of}q_proj.{kind}"], rank, ranks),
                part(named[f"{of}k_proj.{kind}"], rank // replicas, kv_ranks),
                part(named[f"{of}v_proj.{kind}"], rank // replicas, kv_ranks),
            ]
        )

    attention.qkv_proj = linear(
        fused("weight"),
        *(rank, ranks),
        bias=parameter(fused("bias")),
        num_heads=HEADS // ranks,
        num_kv_heads=KV_HEADS // kv_ranks,
        num_kv_head_replicas=replicas,
        head_size=HEAD,
        v_head_size=V_HEAD,
        output_sizes=[1, 1, 1],  # not what says where the heads lie
    )
    attention.o_proj = linear(part(named[f"{of}o_proj.weight"], rank, ranks, 1), rank, ranks)
    attention.q_norm = nn.Module()
    attention.q_norm.weight = parameter(named[f"{of}q_norm.weight"])
    layer = nn.Module()
    layer.self_attn, layer.mlp = attention, mlp
    if experts:
        mlp.experts = _experts(named, rank, ranks, backend, whole)
    else:
        gate, up = (part(named[f"model.layers.0.mlp.{n}_proj.weight"], rank, ranks) for n in ("gate", "up"))
        mlp.gate_up_proj = linear(torch.cat([gate, up]), rank, ranks, output_sizes=[FFN, FFN])
        down = part(named["model.layers.0.mlp.down_proj.weight"], rank, ranks, 1)
        mlp.down_proj = linear(down, rank, ranks)
    inner = nn.Module()
    inner.layers, inner.norm, inner.embed_tokens = nn.ModuleList([layer]), nn.Module(), nn.Module()
    inner.norm.weight = parameter(named["model.norm.weight"])
    begin, rows = rank * PADDED // ranks, PADDED // ranks
    mine = named["model.embed_tokens.weight"][begin : begin + rows]
    padded = torch.cat([mine, torch.zeros(rows - len(mine), HIDDEN)])
    embedding = inner.embed_tokens
    embedding.weight, embedding.quant_method = parameter(padded), UnquantizedLinearMethod()
    embedding.num_embeddings_per_partition, embedding.embedding_dim = rows, HIDDEN
    ends = min(begin + rows, VOCAB)
    embedding.shard_indices = SimpleNamespace(
        org_vocab_start_index=min(begin, VOCAB), org_vocab_end_index=max(ends, min(begin, VOCAB))
    )
    root.model = inner
    root.lm_head = embedding
    return root


def _experts(named, rank, ranks, backend, whole):
    of = "model.layers.0.mlp.experts."
    held = range(whole[0], EXPERTS, whole[1])
    split = (rank, ranks)
    stacks = {
        kind: [part(named[f"{of}{n}.{kind}_proj.weight"], *split, int(kind == "down")) for n in held]
        for kind in ("gate", "up", "down")
    }
    experts = nn.Module()
    gate_up = [torch.cat(pair) for pair in zip(stacks["gate"], stacks["up"], strict=True)]
    experts.w13_weight = parameter(torch.stack(gate_up))
    experts.w2_weight = parameter(torch.stack(stacks["down"]))
    experts.quant_method = UnquantizedFusedMoEMethod(backend)
    experts.moe_config = SimpleNamespace(tp_rank=split[0])
    numbers = {number: local for local, number in enumerate(held)}
    experts._map_global_expert_id_to_local_expert_id = lambda number: numbers.get(number, -1)
    return experts


def pack(layer):
    """Do to a layer what vLLM does on CPUs: the kernel keeps the weight, the parameter is emptied."""
    kept = layer.weight.detach().clone()
    layer.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, kept, bias)
    if not hasattr(layer, "shard_indices"):
        layer.weight = parameter(torch.empty(0))
    return kept

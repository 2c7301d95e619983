"""Optimizers against their formulas, Muon's layouts against whole matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prl.config.training import AdamWConfig, MuonConfig, SgdConfig, SignSgdConfig
from prl.trainer import muon
from prl.trainer.muon import GroupLayout, Muon, ParameterLayout, matrix_update, orthogonalize
from prl.trainer.optimizers import build_optimizer, set_learning_rates

GRADIENTS = [torch.randn(4, 3, generator=torch.Generator().manual_seed(s)) for s in range(3)]


class Tiny(torch.nn.Module):
    """Embedding, hidden matrix, vector and head, as a causal LM exposes them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.hidden = torch.nn.Linear(3, 4)
        self.head = torch.nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def run(config: Any, start: torch.Tensor) -> torch.Tensor:
    """The hidden matrix after the three gradients."""
    model = Tiny()
    with torch.no_grad():
        model.hidden.weight.copy_(start)
    optimizer = build_optimizer(config, model)
    for gradient in GRADIENTS:
        model.hidden.weight.grad = gradient.clone()
        optimizer.step()
    return model.hidden.weight.detach()


START = torch.linspace(-1, 1, 12).view(4, 3)


def test_adamw_is_torchs() -> None:
    weight = torch.nn.Parameter(START.clone())
    reference = torch.optim.AdamW([weight], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    for gradient in GRADIENTS:
        weight.grad = gradient.clone()
        reference.step()
    mine = run(AdamWConfig(lr=0.1, betas=[0.8, 0.9], eps=1e-3, weight_decay=0.2), START)
    torch.testing.assert_close(mine, weight.detach())


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_decoupled_decay(nesterov: bool) -> None:
    weight, momentum = START.clone(), torch.zeros(4, 3)
    for gradient in GRADIENTS:
        momentum = 0.9 * momentum + gradient
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * (gradient + 0.9 * momentum if nesterov else momentum)
    mine = run(SgdConfig(lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.2), START)
    torch.testing.assert_close(mine, weight)


def test_sgd_without_decay_is_torchs() -> None:
    weight = torch.nn.Parameter(START.clone())
    reference = torch.optim.SGD([weight], lr=0.1, momentum=0.9, nesterov=True)
    for gradient in GRADIENTS:
        weight.grad = gradient.clone()
        reference.step()
    torch.testing.assert_close(run(SgdConfig(lr=0.1), START), weight.detach())


def test_sign_sgd() -> None:
    weight = START.clone()
    for gradient in GRADIENTS:
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * torch.sign(gradient)
    torch.testing.assert_close(run(SignSgdConfig(lr=0.1, weight_decay=0.2), START), weight)


def newton_schulz_64(matrix: torch.Tensor) -> torch.Tensor:
    """Written by singular values: each step maps s to 3.4445 s - 4.775 s^3 + 2.0315 s^5."""
    u, s, v = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (5, 5), (1, 6)])
def test_orthogonalize_acts_on_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(orthogonalize(matrix).double(), newton_schulz_64(matrix), rtol=1e-4, atol=1e-5)
    singular = torch.linalg.svdvals(orthogonalize(torch.eye(3) + 0.3 * torch.randn(3, 3)))
    assert singular.min() > 0.5 and singular.max() < 1.4


def test_muon_moves_hidden_matrices_and_adamw_the_rest() -> None:
    weight, momentum = START.clone().double(), torch.zeros(4, 3).double()
    for gradient in GRADIENTS:
        momentum = 0.95 * momentum + gradient
        update = newton_schulz_64(gradient + 0.95 * momentum) * (4 / 3) ** 0.5
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * update
    mine = run(MuonConfig(lr=0.1, weight_decay=0.2), START)
    torch.testing.assert_close(mine.double(), weight, rtol=1e-4, atol=1e-5)

    model = Tiny()
    reference = torch.nn.Parameter(model.hidden.bias.detach().clone())
    torchs = torch.optim.AdamW([reference], lr=0.01, betas=(0.9, 0.95), weight_decay=0.2)
    optimizer = build_optimizer(MuonConfig(lr=0.1, adam_lr=0.01, weight_decay=0.2), model)
    for gradient in GRADIENTS:
        model.hidden.bias.grad, reference.grad = gradient[:, 0].clone(), gradient[:, 0].clone()
        optimizer.step()
        torchs.step()
    torch.testing.assert_close(model.hidden.bias.detach(), reference.detach())


@pytest.mark.parametrize("tied", [False, True])
def test_muon_leaves_embeddings_and_head_to_adamw(tied: bool) -> None:
    model = Tiny(tied)
    matrices, rest = build_optimizer(MuonConfig(), model).param_groups
    assert [id(p) for p in matrices["params"]] == [id(model.hidden.weight)]
    assert len(rest["params"]) == (2 if tied else 3)


def test_frozen_parameters_are_not_handed_over() -> None:
    model = Tiny()
    model.hidden.requires_grad_(False)
    for config in (AdamWConfig(), MuonConfig()):
        groups = build_optimizer(config, model).param_groups
        assert all(p.requires_grad for group in groups for p in group["params"])


def test_every_group_follows_the_factor_from_its_own_peak() -> None:
    optimizer = build_optimizer(MuonConfig(lr=0.02, adam_lr=0.001), Tiny())
    assert set_learning_rates(optimizer, 0.5) == pytest.approx(0.01)
    assert set_learning_rates(optimizer, 0.25) == pytest.approx(0.005)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.005, 0.00025])


SHAPES = [torch.Size(s) for s in ((4, 3), (2, 5), (3, 3))]
MATRICES = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(SHAPES)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_group_layout_gives_each_rank_its_part(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO 1 and 2: matrices one after the other, padded to the ranks, cut into equal parts."""
    whole = torch.cat([m.flatten() for m in MATRICES])
    padded = torch.cat([whole, torch.zeros(-len(whole) % (2 * world))])
    parts = padded.view(world, -1)
    monkeypatch.setattr(muon, "_all_gather", lambda part, *_: parts)
    updates = [GroupLayout(SHAPES, rank, world).update(parts[rank]) for rank in range(world)]
    expected = torch.cat([matrix_update(m).flatten() for m in MATRICES])
    torch.testing.assert_close(torch.cat(updates)[: len(whole)], expected)
    assert torch.cat(updates)[len(whole) :].eq(0).all()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_parameter_layout_gives_each_rank_its_parts(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO 3: each matrix padded and cut by itself."""
    sizes = [-(-m.numel() // world) for m in MATRICES]

    def cut(tensors: list[torch.Tensor]) -> torch.Tensor:
        padded = [
            torch.cat([t.flatten(), torch.zeros(world * size - t.numel())]).view(world, size)
            for t, size in zip(tensors, sizes, strict=True)
        ]
        return torch.cat(padded, 1)

    parts = cut(MATRICES)
    monkeypatch.setattr(muon, "_all_gather", lambda part, *_: parts)
    updates = [ParameterLayout(SHAPES, sizes, rank, world).update(parts[rank]) for rank in range(world)]
    torch.testing.assert_close(torch.stack(updates), cut([matrix_update(m) for m in MATRICES]))


def test_a_flat_partition_without_layout_is_no_silent_vector_update() -> None:
    flat = torch.nn.Parameter(torch.zeros(12))
    optimizer = Muon([{"params": [flat], "lr": 0.1, "matrices": True, "momentum": 0.9, "weight_decay": 0.0}])
    flat.grad = torch.ones(12)
    with pytest.raises(KeyError):
        optimizer.step()

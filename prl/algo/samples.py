"""Traces to training samples: one per branch, every token trained at most once.

A node that several branches share is trained in the first of them and is context in the others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from prl.algo.node_streams import COMPONENTS, NodeStreams, check_node
from prl.records import Component, Trace, TrainSample

logger = logging.getLogger(__name__)

PER_TOKEN = ("token_ids", "mask", "logprobs", "temperatures")
STREAMS = ("advantages", "ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")


class BuiltSamples(NamedTuple):
    """Samples of one trace that have a token to train, and how many of its branches were cut at `seq_len`."""

    samples: list[TrainSample]
    truncated: int


def build_samples(
    trace: Trace,
    *,
    env: str,
    action_loss: Component,
    temperature: float,
    seq_len: int,
    min_abs_advantage: float = 0.0,
) -> BuiltSamples:
    """Flattens a scored trace's branches, routes sampled tokens into `action_loss`, truncates and prunes.

    Args:
        temperature: at which the trace was sampled; the learner divides its logits by it.
        seq_len: longest sample, tokens; the tail beyond it is not trained.
        min_abs_advantage: sampled tokens with |advantage| up to this leave the rl component and its count;
            a sample without a member of any component is dropped.

    Raises:
        ValueError: a node whose lists disagree, a token that lacks the credit which its component needs,
            or a temperature that is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"env.{env}: temperature={temperature} cannot be trained on; it must be positive")
    for node in trace.nodes:
        check_node(trace, node, logprobs_required=action_loss != "ce")
    samples: list[TrainSample] = []
    trained: set[int] = set()
    truncated = 0
    for branch in trace.branches:
        sample = _flatten(trace, branch, trained, env, temperature)
        _route(sample, action_loss)
        if not _has_members(sample):
            continue
        trained.update(branch)
        truncated += _truncate(sample, seq_len)
        _check_credit(sample)
        _prune(sample, min_abs_advantage)
        if _has_members(sample):
            samples.append(sample)
    if not trained:
        logger.warning("trace %s of %s has no trainable token", trace.id, env)
    return BuiltSamples(samples, truncated)


def _has_members(sample: TrainSample) -> bool:
    """Whether any token enters the rl, ce or ref_kl component."""
    return any(_rl_members(sample)) or any(sample.ce_weights or ()) or any(sample.ref_kl_weights or ())


def _truncate(sample: TrainSample, seq_len: int) -> bool:
    """Cuts every per-token list at `seq_len`; True if the sample was longer."""
    if len(sample) <= seq_len:
        return False
    for name in PER_TOKEN + STREAMS:
        values = getattr(sample, name)
        if values is not None:
            setattr(sample, name, values[:seq_len])
    return True


def _prune(sample: TrainSample, min_abs_advantage: float) -> None:
    """Takes sampled tokens without credit out of rl; samples without advantages are left alone."""
    if sample.advantages is None:
        return
    idle = [m and abs(a) <= min_abs_advantage for m, a in zip(sample.mask, sample.advantages, strict=True)]
    if any(idle):
        weights = sample.rl_weights or [float(m) for m in sample.mask]
        sample.rl_weights = [0.0 if zero else w for zero, w in zip(idle, weights, strict=True)]


def _flatten(
    trace: Trace, branch: Sequence[int], trained: set[int], env: str, temperature: float
) -> TrainSample:
    """The branch as flat lists. Nodes in `trained` become context: mask False, no weights."""
    nodes = [(trace.nodes[i], i not in trained) for i in branch]
    streams = NodeStreams(trace, nodes)
    token_ids = [token for node, _ in nodes for token in node.token_ids]
    sample = TrainSample(
        token_ids=token_ids,
        mask=streams.mask(),
        logprobs=streams.compact(lambda node: node.logprobs) or [0.0] * len(token_ids),
        temperatures=[temperature] * len(token_ids),
        env=env,
        trace_id=trace.id,
        advantages=streams.compact(lambda node: node.advantages),
        ref_logprobs=streams.compact(lambda node: node.ref_logprobs),
        **{f"{component}_weights": streams.weights(component) for component in COMPONENTS},
    )
    _exclude_first_token(sample)
    return sample


def _exclude_first_token(sample: TrainSample) -> None:
    """In a packed row the first token would be conditioned on its neighbour; it never enters the loss."""
    if not sample.token_ids:
        return
    sample.mask[0] = False
    for name in ("logprobs", *STREAMS):
        values = getattr(sample, name)
        if values is not None:
            values[0] = 0.0


def _route(sample: TrainSample, action_loss: Component) -> None:
    """Sends the sampled tokens into one component; rl needs no stream, absent weights mean 1."""
    if action_loss != "rl":
        name = f"{action_loss}_weights"
        before = getattr(sample, name) or [0.0] * len(sample)
        setattr(sample, name, [1.0 if m else w for m, w in zip(sample.mask, before, strict=True)])
        sample.rl_weights = [0.0] * len(sample)
    for name in ("ce_weights", "ref_kl_weights"):
        if not any(getattr(sample, name) or ()):
            setattr(sample, name, None)


def _rl_members(sample: TrainSample) -> list[bool]:
    if sample.rl_weights is None:
        return sample.mask
    return [m and w != 0 for m, w in zip(sample.mask, sample.rl_weights, strict=True)]


def _check_credit(sample: TrainSample) -> None:
    if sample.advantages is None and any(_rl_members(sample)):
        raise ValueError(
            f"trace {sample.trace_id} of {sample.env} reaches the rl loss without advantages; "
            "its algorithm must call assign_advantage in score_episode or score_group"
        )
    if sample.ref_logprobs is None and any(sample.ref_kl_weights or ()):
        raise ValueError(
            f"trace {sample.trace_id} of {sample.env} reaches the ref_kl loss without reference logprobs; "
            "opd and opsd provide them"
        )

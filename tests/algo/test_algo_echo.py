"""echo: which tokens of the environment are learned, and how much."""

from __future__ import annotations

import asyncio

import pytest
from algo_builders import advantages, answer, episode, errored, given, group, tree

from prl.algo import build_algorithm
from prl.config.algo import EchoConfig, EchoFilterConfig, EchoRoleConfig


def keep_even(trace, offset=0):
    return [[(i + offset) % 2 == 0 for i in range(tokens_of(trace, b))] for b in trace.branches]


def too_few(trace):
    return []


def too_short(trace):
    return [[True] for _ in trace.branches]


def tokens_of(trace, branch):
    return sum(len(trace.nodes[i].token_ids) for i in branch)


def weigh(nodes, branches, config=None):
    one = tree(nodes, branches)
    asyncio.run(build_algorithm(config or EchoConfig(), env="tools").score_episode(episode(one)))
    return [node.loss_weights.get("ce") for node in nodes]


def filtered(name, **kwargs):
    return EchoConfig(filter=EchoFilterConfig(import_path=f"{__name__}:{name}", kwargs=kwargs))


def test_tool_output_after_the_first_turn_is_weighted():
    nodes = [given(2, "tool"), answer(1), given(3, "tool", 1), answer(1, parent=2), given(1, "user", 3)]
    assert weigh(nodes, [[0, 1, 2, 3, 4]]) == [None, None, [0.1] * 3, None, None]


def test_the_role_table_replaces_the_default():
    nodes = [given(2, "user"), answer(1), given(2, "tool", 1), given(1, "user", 2), answer(1, parent=3)]
    config = EchoConfig(roles={"user": EchoRoleConfig(alpha=0.5)})
    assert weigh(nodes, [[0, 1, 2, 3, 4]], config) == [None, None, None, [0.5], None]


def test_only_content_is_weighted_where_the_renderer_tells_it():
    told = given(4, "tool", 1, is_content=[False, True, True, False])
    untold = given(2, "tool", 2, is_content=[True])
    nodes = [given(1), answer(1), told, untold, answer(1, parent=3)]
    assert weigh(nodes, [[0, 1, 2, 3, 4]])[2:4] == [[0.0, 0.1, 0.1, 0.0], [0.1, 0.1]]


def test_the_filter_can_only_remove():
    nodes = [given(1), answer(1), given(3, "tool", 1, is_content=[True, True, False]), answer(1, parent=2)]
    assert weigh(nodes, [[0, 1, 2, 3]], filtered("keep_even"))[2] == [0.0, 0.1, 0.0]
    nodes[2].loss_weights.clear()
    assert weigh(nodes, [[0, 1, 2, 3]], filtered("keep_even", offset=1))[2] == [0.1, 0.0, 0.0]


def test_branches_that_share_a_node_keep_the_larger_weight():
    """The shared tool message starts at another place in each branch, so the filter keeps other tokens."""
    shared = given(3, "tool", 1)
    nodes = [given(1), answer(1), answer(2), shared, answer(1, parent=3)]
    assert weigh(nodes, [[0, 1, 3, 4], [0, 2, 3, 4]], filtered("keep_even"))[3] == [0.1] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [("too_few", "0 lists for 1 branches"), ("too_short", "1 flags for a branch of 6 tokens")],
)
def test_a_filter_of_the_wrong_shape_names_itself_and_the_trace(name, message):
    nodes = [given(1), answer(1), given(3, "tool", 1)]
    with pytest.raises(ValueError, match=f"{name}.*tree-.*{message}"):
        weigh(nodes, [[0, 1, 2]], filtered(name))


def test_a_missing_filter_is_found_when_the_algorithm_is_built():
    with pytest.raises(ValueError, match=r"algo\.filter\.import_path=.*has no 'nowhere'"):
        build_algorithm(filtered("nowhere"), env="tools")


def test_an_empty_role_table_is_refused():
    with pytest.raises(ValueError, match=r"algo\.roles is empty"):
        build_algorithm(EchoConfig(roles={}), env="tools")


def test_errored_traces_are_not_weighted():
    broken = errored()
    broken.nodes.append(given(2, "tool", 1))
    broken.branches = [[0, 1, 2]]
    asyncio.run(build_algorithm(EchoConfig(), env="tools").score_episode(episode(broken)))
    assert broken.nodes[2].loss_weights == {}


def test_echo_has_the_credit_of_grpo():
    episodes = group([1, 0, 1, 0])
    asyncio.run(build_algorithm(EchoConfig(), env="tools").score_group(episodes))
    assert advantages(episodes) == [0.5, -0.5, 0.5, -0.5]

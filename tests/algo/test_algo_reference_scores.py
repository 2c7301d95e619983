"""opd and opsd: what is asked of the reference model, and where its answers go."""

from __future__ import annotations

import asyncio

import pytest
from algo_builders import answer, episode, errored, given, trace, tree

from prl.algo import build_algorithm
from prl.config.algo import OpdConfig, OpsdConfig, SftAlgoConfig


class CountingScorer:
    """Logprob of token i is -i / 100; remembers its calls and how many were open at once."""

    def __init__(self, extra: int = 0) -> None:
        self.calls: list[tuple[list[int], str | None]] = []
        self.open = self.most_open = 0
        self.extra = extra

    async def score(self, token_ids: list[int], cache_salt: str | None = None) -> list[float]:
        self.calls.append((token_ids, cache_salt))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(0)
        self.open -= 1
        return [0.0, *(-i / 100 for i in range(1, len(token_ids) + self.extra))]


def opd(teacher):
    return build_algorithm(OpdConfig(), env="reverse_text", teacher=teacher)


def test_opd_attaches_teacher_logprobs_to_sampled_tokens_only():
    teacher, one = CountingScorer(), trace(sampled=3, prompt=2)
    asyncio.run(opd(teacher).score_episode(episode(one)))
    assert teacher.calls == [([10, 11, 50, 51, 52, 53], None)]
    assert one.nodes[0].ref_logprobs is None
    assert one.nodes[1].ref_logprobs == [-0.03, -0.04, -0.05]
    assert one.nodes[1].advantages is None


def test_opd_asks_for_all_branches_at_once_and_the_first_branch_keeps_shared_nodes():
    nodes = [
        given(2),
        answer(2),
        given(1, "tool", 1),
        answer(1, parent=2),
        given(4, "tool", 1),
        answer(1, parent=4),
    ]
    forked = tree(nodes, [[0, 1, 2, 3], [0, 1, 4, 5]])
    teacher = CountingScorer()
    asyncio.run(opd(teacher).score_episode(episode(forked, trace(), errored())))
    assert [len(tokens) for tokens, _ in teacher.calls] == [8, 11, 6]
    assert teacher.most_open == 3
    assert nodes[1].ref_logprobs == [-0.03, -0.04]
    assert (nodes[3].ref_logprobs, nodes[5].ref_logprobs) == ([-0.07], [-0.10])


def test_a_node_keeps_the_values_of_its_first_branch():
    class Numbered:
        calls = 0

        async def score(self, token_ids, cache_salt=None):
            self.calls += 1
            return [-float(self.calls)] * len(token_ids)

    nodes = [given(2), answer(2), given(1, "tool", 1), answer(1, parent=2), answer(1, parent=1)]
    asyncio.run(opd(Numbered()).score_episode(episode(tree(nodes, [[0, 1, 2, 3], [0, 1, 4]]))))
    assert [node.ref_logprobs for node in nodes if node.sampled] == [[-1.0, -1.0], [-1.0], [-2.0]]


def test_a_branch_without_sampled_tokens_is_not_scored():
    teacher = CountingScorer()
    two = tree([given(2), answer(1), given(3)], [[0, 1], [2]])
    asyncio.run(opd(teacher).score_episode(episode(two)))
    assert len(teacher.calls) == 1


def test_an_answer_of_the_wrong_length_names_the_trace():
    one = trace()
    with pytest.raises(ValueError, match=f"{one.id}.*7 reference logprobs for 6 tokens"):
        asyncio.run(opd(CountingScorer(extra=1)).score_episode(episode(one)))


def test_a_failing_teacher_raises_its_own_error():
    class Broken:
        async def score(self, token_ids, cache_salt=None):
            raise ConnectionError("the teacher is gone")

    with pytest.raises(ConnectionError, match="the teacher is gone"):
        asyncio.run(opd(Broken()).score_episode(episode(trace())))


def test_opd_without_a_teacher_is_refused():
    with pytest.raises(ValueError, match=r"algo\.teacher\.model"):
        opd(None)


def opsd(scorer, rendered, longest=None, **settings):
    def render(text):
        rendered.append(text)
        return [901, 902, 903]

    return build_algorithm(
        OpsdConfig(**settings),
        env="reverse_text",
        policy_scorer=scorer,
        render_prefix=render,
        longest=longest,
    )


def test_opsd_scores_behind_the_demonstration_and_drops_its_values():
    policy, rendered, one = CountingScorer(), [], trace(sampled=2, prompt=1)
    task = {"info": {"demonstration": "from info"}, "demonstration": "from the task"}
    asyncio.run(opsd(policy, rendered).score_episode(episode(one, task=task)))
    assert policy.calls[0][0] == [901, 902, 903, 10, 50, 51, 52]
    assert one.nodes[1].ref_logprobs == [-0.05, -0.06]
    assert "<demonstration>\nfrom info\n</demonstration>" in rendered[0]


@pytest.mark.parametrize(("longest", "scored"), [(7, 1), (6, 0), (None, 1)])
def test_a_trace_that_cannot_be_scored_is_left_out_and_counted(longest, scored):
    """Four tokens behind a demonstration of three: the run goes on where the engine would refuse them."""
    policy, long = CountingScorer(), trace(sampled=2, prompt=1)
    algorithm = opsd(policy, [], longest=longest)
    asyncio.run(algorithm.score_episode(episode(long, task={"demonstration": "x"})))
    assert len(policy.calls) == scored and (long.error is None) == bool(scored)
    assert scored or long.error.type == "TooLongToScore"
    teacher, one = CountingScorer(), trace(sampled=2, prompt=1)
    taught = build_algorithm(OpdConfig(), env="reverse_text", teacher=teacher, longest=3)
    asyncio.run(taught.score_episode(episode(one)))
    assert teacher.calls == [] and not one.trainable and "4 tokens" in one.error.message


def test_opsd_salts_every_request_differently():
    nodes = [given(2), answer(1), answer(1)]
    policy, forked = CountingScorer(), tree(nodes, [[0, 1], [0, 2]])
    asyncio.run(opsd(policy, []).score_episode(episode(forked, trace(), task={"demonstration": "x"})))
    salts = [salt for _, salt in policy.calls]
    assert len(set(salts)) == 3 and None not in salts


def test_opsd_falls_back_to_the_field_of_the_task():
    rendered: list[str] = []
    algorithm = opsd(CountingScorer(), rendered, demo_key="solution", template="See {demonstration}!")
    asyncio.run(algorithm.score_episode(episode(trace(), task={"info": {}, "solution": "a {brace}"})))
    assert rendered == ["See a {brace}!"]


def test_opsd_without_a_demonstration_names_the_task_and_its_fields():
    with pytest.raises(ValueError, match=r"'demonstration' in task 'task-0'.*answer, info.*algo\.demo_key"):
        asyncio.run(
            opsd(CountingScorer(), []).score_episode(episode(trace(), task={"info": {}, "answer": 1}))
        )


def test_opsd_refuses_a_template_without_the_placeholder():
    with pytest.raises(ValueError, match=r"\{demonstration\}"):
        opsd(CountingScorer(), [], template="nothing")


def test_opsd_needs_the_policy_and_a_renderer():
    with pytest.raises(ValueError, match="renderer"):
        build_algorithm(OpsdConfig(), env="reverse_text", policy_scorer=CountingScorer())


def test_sft_samples_from_its_teacher_and_scores_nothing():
    algorithm, one = build_algorithm(SftAlgoConfig(), env="reverse_text"), trace()
    assert (algorithm.action_loss, algorithm.sampled_by) == ("ce", "teacher")
    asyncio.run(algorithm.score_episode(episode(one)))
    asyncio.run(algorithm.score_group([episode(one)]))
    assert one.nodes[1].advantages is None and one.nodes[1].ref_logprobs is None

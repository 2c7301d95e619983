"""Answer questions about an invented island by searching and reading its encyclopaedia. Finite, offline.

Tools: `wiki_search(query)` gives titles, `wiki_read(title)` an article. The reward is 1 when the answer
stands in `<answer>` tags or, without tags, when the reply is the answer; else 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from prl.env.tasksets._brackets import reply
from prl.env.tasksets._island import encyclopaedia
from prl.env.tasksets._shared_box import SharedBoxEnv

SYSTEM = (
    "Answer the question about the island. You do not know it: use wiki_search and wiki_read. "
    "Give the answer alone in <answer> </answer> tags."
)


class WikiTools(vf.Toolset[vf.SharedToolsetConfig]):
    """The encyclopaedia, one server for all rollouts of a worker."""

    TOOL_PREFIX = "wiki"

    @vf.tool
    def search(self, query: str) -> str:
        """Titles of the articles that fit the query best."""
        return "\n".join(encyclopaedia().search(query)) or "no article has any of these words"

    @vf.tool
    def read(self, title: str) -> str:
        """The article of this title."""
        article = encyclopaedia().articles.get(title.strip())
        return article.text if article else f"there is no article {title!r}; search for its title"


class WikiData(vf.TaskData):
    answer: str
    hops: int


class WikiTask(vf.Task[WikiData]):
    """Right or wrong."""

    @vf.reward
    async def right_answer(self, trace: vf.Trace) -> float:
        return float(normalised(given_answer(reply(trace))) == normalised(self.data.answer))

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class WikiSearchConfig(vf.TasksetConfig):
    """Options of `env.<name>.taskset`."""

    hops: int | None = Field(None, ge=1, le=2)
    """Only questions for which so many articles must be read; None = all."""
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class WikiSearchTaskset(vf.Taskset[WikiTask, WikiSearchConfig]):
    """One task a question."""

    @classmethod
    def toolsets(cls, config: WikiSearchConfig) -> list[vf.Toolset]:
        return [WikiTools(config.tools)]

    def load(self) -> Iterator[WikiTask]:
        for question in encyclopaedia().questions:
            if self.config.hops in (None, question.hops):
                data = WikiData(
                    prompt=question.prompt, system_prompt=SYSTEM, answer=question.answer, hops=question.hops
                )
                yield WikiTask(data, self.config.task)


def given_answer(text: str) -> str:
    """What stands in the last pair of tags; the whole reply without tags."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1] if found else text


def normalised(text: str) -> str:
    """Words in lower case, without articles and punctuation."""
    return " ".join(word for word in re.findall(r"\w+", text.lower()) if word not in ("a", "an", "the"))


__all__ = ["SharedBoxEnv", "WikiSearchTaskset"]

if __name__ == "__main__":
    WikiTools.run()

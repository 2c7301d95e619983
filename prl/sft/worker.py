"""A data worker: `python -m prl.sft.worker`, fed by `prl.sft.reader.Pool` over its standard streams."""

from __future__ import annotations

import json
import os
import sys
from typing import IO, Any

from prl.config.load import build
from prl.config.schema import GROUPS
from prl.config.training import ModelConfig
from prl.sft.documents import Documents, build_documents
from prl.sft.reader import answer, receive, send


def main() -> None:
    """Answers chunks of indices until the input ends."""
    # Whatever prints must not get between the messages.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, out)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The first message is the job, every other one a list of indices."""
    job = receive(requests)
    if job is None:
        return
    documents = open_job(json.loads(job))
    while (indices := receive(requests)) is not None:
        try:
            send(answers, answer(documents, indices))
        except BrokenPipeError:  # the trainer has what it needs
            return


def open_job(job: dict[str, Any]) -> Documents:
    """The documents that a job describes."""
    data = build(GROUPS["data"][job["data"]["name"]], job["data"])
    return build_documents(data, build(ModelConfig, job["model"]), job["seq_len"], job["seed"])


if __name__ == "__main__":
    main()

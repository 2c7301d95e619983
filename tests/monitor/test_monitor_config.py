from __future__ import annotations

import pytest

from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("rl", ["monitor.heartbeat_url=watchdog"], "monitor.heartbeat_url = watchdog: not a URL"),
        ("rl", ["tracking.register_model=mine"], "Set ckpt.at_end=true"),
        (
            "rl",
            ["tracking.register_model=a/b", "ckpt=end"],
            "takes no model name that is empty or holds / or :",
        ),
        ("eval", ["env=[reverse_text]", "tracking.register_model=mine"], "an evaluation makes no weights"),
        ("rl", ["tracking.system_seconds=-1"], "tracking.system_seconds = -1"),
        ("rl", ["tracking=none", "tracking.traces_per_step=1"], "It belongs to tracking=mlflow"),
        (
            "rl",
            ["+log.levels.trainr=debug"],
            "log.levels.trainr = debug: there is no such process. Nearest: trainer",
        ),
        ("sft", ["+log.levels.trainer=loud"], "log.levels.trainer = loud: there is no such level"),
        ("inference", ["+log.levels.x=info"], "log.levels.x = info: there is no such process"),
        ("rl", ["log.format=jsonl"], "log.format = jsonl"),
        ("rl", ["tracking.uri=./mlruns"], "MLflow keeps runs in a database or on a server"),
    ],
)
def test_what_is_refused_and_the_remedy(command: str, words: list[str], expected: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        compose_job(command, words)
    assert expected in str(refused.value)


def test_what_is_accepted() -> None:
    config = compose_job("rl", ["ckpt=end", "tracking.register_model=mine", "monitor.endpoints=true"])
    assert config.tracking.register_model == "mine" and config.monitor.host == "127.0.0.1"
    assert config.tracking.traces_per_step == 1 and config.tracking.max_traces == 100
    none = compose_job("sft", ["tracking=none", "tracking.system_seconds=0"])
    assert none.tracking.name == "none" and none.monitor.heartbeat_url is None
    logs = compose_job(
        "rl", ["log.format=json", "+log.levels={trainer: debug, env/reverse_text: warning}"]
    ).log
    assert logs.format == "json" and logs.levels == {"trainer": "debug", "env/reverse_text": "warning"}
    server = compose_job("rl", ["tracking.uri=http://tracker:5000"])
    assert server.tracking.uri == "http://tracker:5000"

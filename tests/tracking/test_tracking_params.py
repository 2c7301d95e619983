from __future__ import annotations

import pytest

from prl.config.algo import EndpointConfig, OpdConfig
from prl.config.loss import IpoConfig
from prl.config.schema import RlConfig, RunConfig
from prl.config.serving import EmbeddedConfig, MlflowConfig
from prl.config.sources import EnvConfig
from prl.config.training import AdamWConfig, SchedulerConfig
from prl.tracking.params import flatten
from prl.tracking.secrets import HIDDEN, is_secret, redact, redact_override, redact_text


def config(**fields: object) -> RlConfig:
    teacher = EndpointConfig(model="m", headers={"Authorization": "Bearer abc"})
    return RlConfig(
        algo=OpdConfig(teacher=teacher),
        loss=IpoConfig(),
        optim=AdamWConfig(lr=1e-4),
        scheduler=SchedulerConfig(),
        inference=EmbeddedConfig(),
        env={"gsm8k": EnvConfig(ratio=2.0)},
        **{"tracking": MlflowConfig(), **fields},  # type: ignore[arg-type]
    )


def test_every_leaf_is_a_param() -> None:
    params = flatten(config())
    assert params["optim.lr"] == "0.0001" and params["optim.name"] == "adamw"
    assert params["optim.betas"] == "[0.9, 0.999]" and params["env.gsm8k.ratio"] == "2.0"
    assert params["tracking.uri"] == "null" and params["env.gsm8k.taskset"] == "{}"
    assert all(isinstance(value, str) for value in params.values())


def test_what_differs_with_every_launch_is_no_param() -> None:
    fresh, resumed = flatten(config()), flatten(config(run=RunConfig(resume="/x/step_3"), dry_run=True))
    assert fresh == resumed


def test_secrets_never_leave() -> None:
    params = flatten(config())
    assert params["algo.teacher.headers.Authorization"] == HIDDEN
    assert params["algo.teacher.api_key_var"] == "PRL_API_KEY", "the name of a variable is no secret"
    assert "abc" not in str(params)


def test_redact_copies_and_hides() -> None:
    tree = {
        "a": {"password": "x", "b": 1},
        "headers": {"k": "v", "n": None},
        "my_token": "t",
        "max_tokens": 5,
    }
    hidden = redact(tree)
    assert hidden["a"] == {"password": HIDDEN, "b": 1} and hidden["headers"] == {"k": HIDDEN, "n": None}
    assert hidden["my_token"] == HIDDEN and hidden["max_tokens"] == 5
    assert tree["my_token"] == "t"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("headers", True),
        ("hf_token", True),
        ("HF_TOKEN", True),
        ("api_key", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("heartbeat_url", True),
        ("api_key_var", False),
        ("max_tokens", False),
    ],
)
def test_which_names_hold_secrets(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def test_overrides_are_redacted_by_their_key() -> None:
    assert redact_override("algo.teacher.headers.Authorization=Bearer abc").endswith("=***")
    assert redact_override("optim.lr=1e-4") == "optim.lr=1e-4" and redact_override("rl") == "rl"


def test_logins_within_urls_are_hidden_wherever_they_are() -> None:
    url = "https://user:pass@host:5000/x"
    assert redact({"uri": url, "list": [url, 3]}) == {
        "uri": "https://***@host:5000/x",
        "list": ["https://***@host:5000/x", 3],
    }
    assert redact_override(f"tracking.uri={url}") == "tracking.uri=https://***@host:5000/x"
    assert flatten(config(tracking=MlflowConfig(uri=url)))["tracking.uri"] == "https://***@host:5000/x"
    assert redact("mail@host and http://host/a@b") == "mail@host and http://host/a@b"


def test_values_of_secret_words_are_hidden_in_text() -> None:
    text = "export WANDB_API_KEY=abc\nsrun prl +algo.teacher.headers.X='a b' optim.lr=1\n"
    assert (
        redact_text(text)
        == f"export WANDB_API_KEY={HIDDEN}\nsrun prl +algo.teacher.headers.X={HIDDEN} optim.lr=1\n"
    )
    code = 'f(token=token, password="correct horse battery")\n'
    assert redact_text(code, shortest=16) == f"f(token=token, password={HIDDEN})\n"

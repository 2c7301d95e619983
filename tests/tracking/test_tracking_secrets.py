"""No key, header or password that a user passes in any form reaches what is told about a run."""

from __future__ import annotations

import json

import pytest
import yaml

from prl.tracking.secrets import HIDDEN, is_secret, redact, redact_override, redact_text

SECRET = "s3cr3t-0123456789-abcdef"


@pytest.mark.parametrize(
    "override",
    [
        f"algo.teacher.headers.Authorization={SECRET}",
        f"+algo.teacher.headers.X-Api-Key='{SECRET}'",
        f"algo.teacher={{base_url: http://h/v1, headers: {{Authorization: Bearer {SECRET}}}}}",
        f'++algo.teacher={{"headers":{{"X-Key":"{SECRET}"}}}}',
        f"env=[{{id: a, args: {{api_key: {SECRET}}}}}]",
        f"env.words.taskset.judge_api_key={SECRET}",
        f"env_vars.all.OPENAI_API_KEY={SECRET}",
        f"env_vars.trainer={{GITHUB_PAT: {SECRET}, NCCL_DEBUG: WARN}}",
        f"inference.env.MY_AUTH_KEY={SECRET}",
        f"env_vars.all.DB_PASSWORD={SECRET}",
        f"tracking.uri=https://user:{SECRET}@host/x",
        f"monitor.heartbeat_url=https://host/ping/{SECRET}",
        f"rollout.sampling.extra_body={{broken: [, token: {SECRET}",
        f"run.tags.note=Bearer {SECRET}",
    ],
)
def test_a_secret_in_an_override_is_hidden_whatever_its_form(override: str) -> None:
    told = redact_override(override)
    assert SECRET not in told and HIDDEN in told
    assert told.partition("=")[0] == override.partition("=")[0]


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=1e-4",
        "env=[reverse_text,arithmetic]",
        "env.words={taskset: {min_length: 4, max_tokens: 8}}",
        "algo.teacher.api_key_var=PRL_API_KEY",
        "algo.demo_key=demonstration",
        "env_vars.trainer.NCCL_DEBUG=WARN",
        "env_vars.all.TOKENIZERS_PARALLELISM=false",
        "++model={path: /models/x}",
    ],
)
def test_what_is_no_secret_stays_word_for_word(override: str) -> None:
    assert redact_override(override) == override


def test_the_rest_of_a_table_stays_readable() -> None:
    told = redact_override(f"algo.teacher={{model: m, headers: {{Authorization: {SECRET}}}, timeout: 3}}")
    tree = yaml.safe_load(told.partition("=")[2])
    assert tree == {"model": "m", "headers": {"Authorization": HIDDEN}, "timeout": 3}


@pytest.mark.parametrize(
    "line",
    [
        f'+api_key = "{SECRET}"',
        f"+  api_key: {SECRET}",
        f'+  "Authorization": "{SECRET}",',
        f"+HF_TOKEN={SECRET}",
        f"+  'X-Api-Key': '{SECRET}'",
        f"+client = OpenAI(api_key='{SECRET}')",
        f"+url = 'https://me:{SECRET}@host'",
        f"+curl -H 'Accept: x' -H 'Authorization: Bearer {SECRET}'",
    ],
)
def test_a_secret_in_a_diff_is_hidden_in_code_yaml_and_json(line: str) -> None:
    told = redact_text(f"+before = 1\n{line}\n+after = 2\n", shortest=16)
    assert SECRET not in told and HIDDEN in told
    assert told.startswith("+before = 1\n") and told.endswith("+after = 2\n")


@pytest.mark.parametrize(
    "shape",
    [
        "sk-proj-0123456789abcdefghij",
        "hf_0123456789abcdefghijklmn",
        "ghp_0123456789abcdefghijklmn",
        "github_pat_0123456789abcdefghijklmn",
        "AKIA0123456789ABCDEF",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabcd\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_key_is_known_by_its_look_under_any_name(shape: str) -> None:
    assert redact_text(f"x = f('{shape}')\n", shortest=16) == f"x = f('{HIDDEN}')\n"
    assert redact({"note": shape, "list": [shape]}) == {"note": HIDDEN, "list": [HIDDEN]}


def test_code_stays_readable() -> None:
    code = "+    token = tokens[0]\n+    key: str = field(token=token)\n+    # the api_key: see below\n"
    assert redact_text(code, shortest=16) == code


@pytest.mark.parametrize("name", ["X-Api-Key", "extra_headers", "Authorization", "AZURE_KEY", "MY_SECRET_ID"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "MONKEY", "key", "demo_key", "KEY_VAR", "num_tokens"]
)
def test_names_of_none(name: str) -> None:
    assert not is_secret(name)


def test_a_config_as_json_has_none_left() -> None:
    tree = {
        "a": [{"headers": {"k": SECRET}}, {"api_key": SECRET}],
        "b": {"password": None, "url": "http://h"},
    }
    told = json.dumps(redact(tree))
    assert SECRET not in told and '"password": null' in told and "http://h" in told

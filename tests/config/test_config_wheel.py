"""An installed wheel, away from any checkout, has every option and composes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

COMPOSE_ALL = """
import json, sys
from prl.config.compose import compose_job
from prl.config.options import headline, split_audience
from prl.config.store import conf_dir
import launchers, prl

conf = conf_dir()
needs = {
    "algo/hierarchical_grpo": ["env=[proposer_solver]"],
    "algo/opd": ["algo.teacher.model=tiny"],
    "algo/sft": ["algo.teacher.model=tiny"],
    "loss/custom": ["loss.import_path=a:b"],
    "data/rows": ["data.path=bundled:reverse_text"],
    "inference/external": ["inference.base_url=http://h/v1"],
    "inference/vllm": ["inference.python=" + sys.executable],
}
composed = []
for path in sorted(conf.rglob("*.yaml")):
    option = str(path.relative_to(conf).with_suffix(""))
    group, _, name = option.rpartition("/")
    if group in ("", "hydra") or group.startswith("recipe/"):
        continue
    audience = split_audience(headline(path.read_text()))[0]
    command = audience or ("sft" if group == "data" else "rl")
    choice = f"{group}=[{name}]" if group == "env" else f"{group}={name}"
    compose_job(command, [choice, *needs.get(option, [])])
    composed.append(option)
print(json.dumps({"conf": str(conf), "launchers": launchers.__file__, "composed": composed}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the wheel of this checkout was installed."""
    pytest.importorskip("hatchling")
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(REPOSITORY)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = wheels.glob("*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    return site


def test_every_option_of_an_installed_wheel_composes(site: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", COMPOSE_ALL],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["conf"] == str(site / "prl" / "conf")
    assert Path(found["launchers"]).is_relative_to(site)
    conf = REPOSITORY / "conf"
    groups = [path.relative_to(conf).parts[0] for path in conf.rglob("*/*.yaml")]
    assert len(found["composed"]) == len([group for group in groups if group not in ("hydra", "recipe")])


def test_the_command_line_of_an_installed_wheel_answers(site: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "prl", "algo=gpro"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "algo = gpro: no such option. Nearest: grpo;" in result.stderr

"""A package installed beside prl brings options: structured ones, and a directory on the search path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = """
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin


@dataclass
class Mine:
    name: str = "mine"
    import_path: str = "words_pkg.algo:Mine"


ConfigStore.instance().store(group="algo", name="mine", node=Mine)


class WordsOptions(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        search_path.append(provider="words", path="pkg://words_pkg.options")
"""
ALGORITHM = '''
from prl.algo.base import Algorithm


class Mine(Algorithm):
    """Gives no credit."""
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """What `pip install` would have put into site-packages."""
    files = {
        "hydra_plugins/words_plugin.py": PLUGIN,
        "words_pkg/__init__.py": "",
        "words_pkg/algo.py": ALGORITHM,
        "words_pkg/options/__init__.py": "",
        "words_pkg/options/env/words.yaml": "# @package env.words\n# Choose words.\nid: reverse_text\n",
    }
    for name, text in files.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    return tmp_path / "site"


def prl(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([str(package), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "prl", *words]
    env = {**os.environ, "PYTHONPATH": search}
    return subprocess.run(
        command, cwd=package.parent, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_its_options_are_chosen_like_prls_own(package: Path) -> None:
    done = prl(package, "algo=mine", "env=[words]", "dry_run=true")
    assert done.returncode == 0, done.stderr
    assert "algo         mine" in done.stdout and "env          words" in done.stdout
    assert "env/words" in done.stdout


def test_they_are_listed_where_a_name_is_wrong(package: Path) -> None:
    done = prl(package, "algo=mien", "env=[wrods]", "dry_run=true")
    assert done.returncode == 2
    assert "Nearest: mine;" in done.stderr and "Nearest: words;" in done.stderr

"""`package.module:Name` is judged by reading the module's source, without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prl.import_path import load_object, require_object


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_what_the_source_defines_in_any_way_is_there(written: Path) -> None:
    (written / "own_names.py").write_text(
        "import os.path\nfrom json import loads as read\n"
        "def mine(): ...\nasync def later(): ...\nclass Loss: ...\n"
        "if True:\n    other = mine\nraise RuntimeError('it was imported')\n"
    )
    for name in ("mine", "later", "Loss", "other", "read", "os"):
        require_object(f"own_names:{name}", "loss.import_path")
    assert "own_names" not in sys.modules


@pytest.mark.parametrize(("name", "remedy"), [("mien", "; nearest: mine$"), ("xyzzy", "$"), ("loads", "")])
def test_a_mistyped_name_is_told_with_the_nearest(written: Path, name: str, remedy: str) -> None:
    (written / "own_losses.py").write_text("from json import loads as read\ndef mine(): ...\n")
    with pytest.raises(
        ValueError, match=rf"loss\.import_path = own_losses:{name}: .*has no '{name}'.*{remedy}"
    ):
        require_object(f"own_losses:{name}", "loss.import_path")


@pytest.mark.parametrize(
    "source", ["from math import *\n", "def __getattr__(name): ...\n", "this is no Python\n"]
)
def test_what_the_source_cannot_tell_is_left_to_the_import(written: Path, source: str) -> None:
    (written / "own_riddles.py").write_text(source)
    require_object("own_riddles:anything", "loss.import_path")


@pytest.mark.parametrize("path", ["no_such_package.losses:mine", "json.no_such:mine", ":mine", ""])
def test_a_module_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=r"loss\.import_path = .*: there is no module"):
        require_object(path, "loss.import_path")


def test_loading_names_what_the_module_has(written: Path) -> None:
    (written / "own_objects.py").write_text("def mine():\n    return 3\n")
    assert load_object("own_objects:mine", "k")() == 3
    with pytest.raises(ValueError, match=r"k='own_objects:yours': .* has no 'yours'; it has mine"):
        load_object("own_objects:yours", "k")
    with pytest.raises(ValueError, match="write it as"):
        load_object("own_objects", "k")
    with pytest.raises(ValueError, match="there is no module 'own_nothing'"):
        load_object("own_nothing:x", "k")

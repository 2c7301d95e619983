from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from prl.run_dir import RunDir
from prl.tracking import provenance
from prl.tracking.provenance import (
    DIFF_BYTES,
    attempt_files,
    code_directory,
    environment_freeze,
    git_commit,
    git_diff,
    job_tags,
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    git("init", "--quiet")
    (tmp_path / "code.py").write_text("old = 1\n")
    git("add", "code.py")
    git("commit", "--quiet", "-m", "first")
    return tmp_path


def test_a_clean_checkout_has_a_commit_and_no_diff(repository: Path) -> None:
    assert len(git_commit(repository) or "") == 40 and git_diff(repository) == ""


def test_the_diff_has_changes_and_names_what_git_does_not_know(repository: Path) -> None:
    (repository / "code.py").write_text("new = 2\n")
    (repository / "extra.py").write_text("x")
    text = git_diff(repository)
    assert "-old = 1" in text and "+new = 2" in text and text.endswith("# not in git: extra.py\n")


def test_the_diff_hides_keys_and_stays_readable_code(repository: Path) -> None:
    (repository / "code.py").write_text('api_key="sk-0123456789abcdef"\ntoken=token\n')
    text = git_diff(repository)
    assert "sk-0123" not in text and "api_key=***" in text and "+token=token" in text


def test_a_huge_diff_is_cut(repository: Path) -> None:
    (repository / "code.py").write_text("x\n" * DIFF_BYTES)
    assert len(git_diff(repository)) < DIFF_BYTES + 100 and git_diff(repository).endswith("# cut here\n")


def test_outside_a_repository_there_is_neither(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None and git_diff(tmp_path) == ""


def test_a_run_from_nowhere_is_of_the_checkout_that_prl_lies_in(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = repository / "prl" / "tracking"
    package.mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    monkeypatch.chdir(tmp_path_factory.mktemp("nowhere"))
    assert code_directory() == package and git_commit(code_directory()) == git_commit(repository)
    monkeypatch.chdir(repository)
    assert code_directory() == repository
    monkeypatch.chdir(nowhere := tmp_path_factory.mktemp("nowhere"))
    monkeypatch.setattr(provenance, "__file__", str(nowhere / "provenance.py"))
    assert code_directory() == nowhere


def test_the_freeze_lists_packages_in_order() -> None:
    head, *packages = environment_freeze().splitlines()
    assert head.startswith("# Python 3.") and any(line.startswith("mlflow==3.") for line in packages)
    assert packages == sorted(packages, key=str.lower) and all("==" in line for line in packages)


def test_the_batch_script_is_kept_without_its_secrets(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert set(attempt_files(run, tmp_path)) == {"environment.txt"}
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "17_submission.sh").write_text(
        "#SBATCH -N 2\nexport HF_TOKEN='hf_abc def'\nsrun x\n"
    )
    files = attempt_files(run, tmp_path)
    assert files["17_submission.sh"] == "#SBATCH -N 2\nexport HF_TOKEN=***\nsrun x\n"


def test_tags_of_a_slurm_job() -> None:
    assert job_tags({"HOME": "/"}) == {}
    told = job_tags({"SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "16", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert told == {"job_id": "17", "job_array": "16", "job_nodes": "n[1-2]"}

"""What a job asks for, and what is refused, without any SLURM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launchers.slurm.preflight import array_fits, gpus_are_there, partition_is_known
from launchers.slurm.request import import_line, make_executor, parameters, script
from prl.config.cluster import SlurmConfig, minutes_of, warning_seconds
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors


def text(elements: int = 1, **fields: object) -> str:
    return script(make_executor(parameters(SlurmConfig(**fields), "name"), "/shared/%j"), elements)  # type: ignore[arg-type]


def header(sbatch: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in sbatch.splitlines() if line.startswith("#SBATCH")]
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def test_every_option_reaches_the_script() -> None:
    told = header(
        text(
            partition="gpu",
            account="lab",
            qos="high",
            time="1-02:00:00",
            gpus_per_node=8,
            cpus_per_task=16,
            mem_gb=64,
            constraint="h100",
            nodelist="n[1-2]",
            exclude="n9",
            exclusive=True,
            infer_nodes=2,
            train_nodes=3,
            train_ranks=3,
            job_name="mine",
            signal_delay=200,
            extra={"mail-type": "END"},
        )
    )
    assert told == {
        "partition": "gpu",
        "account": "lab",
        "qos": "high",
        "time": "1560",
        "gpus-per-node": "8",
        "cpus-per-task": "16",
        "mem": "64GB",
        "constraint": "h100",
        "nodelist": "'n[1-2]'",
        "exclude": "n9",
        "exclusive": "",
        "nodes": "5",
        "ntasks-per-node": "1",
        "job-name": "mine",
        "signal": "USR2@200",
        "mail-type": "END",
        "requeue": "",
        "output": told["output"],
        "open-mode": "append",
        "wckey": "submitit",
    }
    assert told["output"].endswith("%j_0_log.out")


def test_the_lines_of_the_script_come_in_order() -> None:
    lines = text(
        activate="source env", setup=["A=1", "B=2"], pre_run="echo last", python="/x/python"
    ).splitlines()
    places = [lines.index(line) for line in ("source env", "A=1", "B=2", "echo last")]
    (srun,) = [index for index, line in enumerate(lines) if line.startswith("srun ")]
    assert places == sorted(places) and places[-1] < srun
    assert "--kill-on-bad-exit=1" in lines[srun] and "--open-mode=append" in lines[srun]
    assert "--wait=0" in lines[srun], "a task that is done does not end the one that still tracks"
    assert " /x/python -u -m submitit.core._submit" in lines[srun]


def test_own_arguments_of_srun_are_added_and_gres_stands_alone() -> None:
    sbatch = text(srun_args=["--cpu-bind=none"], gres="gpu:a100:4", gpus_per_node=4)
    assert "--cpu-bind=none" in sbatch and sbatch.count("kill-on-bad-exit") == 1
    assert header(sbatch)["gres"] == "gpu:a100:4" and "gpus-per-node" not in header(sbatch)


def test_a_sweep_is_one_array_and_leaves_no_trace_in_the_next_script() -> None:
    executor = make_executor(parameters(SlurmConfig(array_parallelism=2), "name"), "/shared/%j")
    assert header(script(executor, 5))["array"] == "0-4%2"
    assert "array" not in header(script(executor))


def test_no_requeue_is_said_too() -> None:
    assert "no-requeue" in header(text(max_requeues=0)) and "requeue" not in header(text(max_requeues=0))


def test_a_checkout_is_importable_on_the_nodes() -> None:
    line = import_line()
    assert line is not None
    command = f"{line}; cd /; {sys.executable} -c 'import launchers, hydra_plugins.prl_launchers'"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("90", 90), ("1:30", 2), ("02:00:00", 120), ("1-12", 2160), ("1-00:30", 1470), ("2-00:00:01", 2881)],
)
def test_time_limits_are_read_as_sbatch_reads_them(limit: str, minutes: int) -> None:
    assert minutes_of(limit) == minutes


@pytest.mark.parametrize("limit", ["", "soon", "4h", "0", "1:75:00", "-5", "1-2-3", "1:2:3:4"])
def test_malformed_time_limits_are_none(limit: str) -> None:
    assert minutes_of(limit) is None


def test_the_warning_leaves_a_short_job_most_of_its_time() -> None:
    assert warning_seconds(SlurmConfig(time="4")) == 60
    assert warning_seconds(SlurmConfig(time="10:00:00")) == 120
    assert warning_seconds(SlurmConfig(time="4", signal_delay=10)) == 10


LISTING = "main|gpu:fake:8(S:0-1)\nsmall|gpu:2,shard:8\nplain|(null)\n"


@pytest.mark.parametrize(
    ("partition", "gpus", "told"),
    [
        (None, 9, "have at most 8"),
        ("small", 3, "of partition small have at most 2"),
        ("plain", 1, "have at most 0"),
        ("main,small", 8, ""),
        (None, None, ""),
    ],
)
def test_more_gpus_than_a_node_has_are_refused(partition: str | None, gpus: int | None, told: str) -> None:
    problems = list(gpus_are_there(SlurmConfig(partition=partition, gpus_per_node=gpus), LISTING))
    assert bool(problems) is bool(told) and (not told or told in str(problems[0]))
    assert not list(gpus_are_there(SlurmConfig(gpus_per_node=99), "")), "SLURM did not say"


def test_an_unknown_partition_is_refused_with_the_known_ones() -> None:
    (problem,) = partition_is_known(SlurmConfig(partition="mian"), "main\nlow\nmain\n")
    assert str(problem) == "cluster.partition = mian: no such partition. Nearest: main; valid: low, main."
    assert not list(partition_is_known(SlurmConfig(partition="low,main"), "main\nlow\n"))


def test_an_array_beyond_the_limit_is_refused() -> None:
    config = "LaunchType = x\nMaxArraySize            = 1001\n"
    assert not list(array_fits(1001, config)) and not list(array_fits(5000, ""))
    (problem,) = array_fits(1002, config)
    assert "1002 elements" in str(problem) and "1001" in str(problem)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cluster.time=4h"], "cluster.time = 4h: not a time limit"),
        (["cluster.time=4", "cluster.signal_delay=200"], "cluster.signal_delay = 200: more than half"),
        (["cluster.train_ranks=3", "cluster.train_nodes=2"], "3 ranks cannot be spread evenly"),
        (["cluster.train_ranks=9", "cluster.gpus_per_node=8"], "9 on each trainer node"),
        (["cluster.gres='gpu:4'"], "Add cluster.gpus_per_node=4."),
        (
            ["cluster.gres='gpu:a:4'", "cluster.gpus_per_node=2"],
            "cluster.gpus_per_node = 2. Make them agree.",
        ),
        (["cluster.extra={nodes: 3}"], "set by cluster.train_nodes and cluster.infer_nodes"),
        (["cluster.extra={hold: false}"], "sbatch has no such value"),
        (["cluster.srun_args=['--output=x']"], "set by prl"),
        (["cluster.srun_args=['--wait=30']"], "set by prl"),
        (["cluster.infer_nodes=2"], "cluster.infer_nodes = 2: only 1 engine to place on them"),
        (["cluster.infer_nodes=3", "inference.replicas=2"], "only 2 engines"),
        (["cluster.infer_gpus=9", "cluster.gpus_per_node=8"], "hold 8"),
    ],
)
def test_combinations_that_cannot_work_are_refused_at_compose(words: list[str], told: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        compose_job("rl", ["cluster=slurm", *words])
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("command", "words", "told"),
    [
        ("sft", ["cluster.infer_nodes=1"], "starts no engines"),
        ("eval", ["cluster.train_nodes=2", "cluster.train_ranks=2"], "`prl eval` runs on one node"),
    ],
)
def test_nodes_without_work_are_refused(command: str, words: list[str], told: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        compose_job(command, ["cluster=slurm", *words])
    assert told in str(caught.value)


def test_asking_for_a_job_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from prl.__main__ import main; "
        "code = main(['cluster=slurm', 'run.name=x', 'dry_run=true']); "
        "heavy = {'torch', 'transformers', 'mlflow', 'verifiers', 'deepspeed'} & set(sys.modules); "
        "sys.exit(code or (3 if heavy else 0))"
    )
    root = str(Path(__file__).parents[2])
    told = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": root}, check=False)
    assert told.returncode == 0 and list(tmp_path.iterdir()) == []

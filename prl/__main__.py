"""`python -m prl [command] overrides...`: composes, checks, and hands the config to the command's job.

Exit codes: 0 done, 2 the configuration was refused, 130 stopped by Ctrl-C, anything else from the job.
"""

from __future__ import annotations

import gc
import importlib
import select
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prl.config.command_line import CommandLine

COMMANDS = {
    "rl": "launchers.run:launch_rl",
    "sft": "launchers.run:launch_sft",
    "eval": "launchers.run_eval:launch_eval",
    "export": "launchers.run_export:launch_export",
    "inference": "launchers.serve:launch_inference",
}
"""Command -> where its job lives; imported when the configuration has been accepted."""

TOOLS = {
    "sweep": "launchers.sweeps.tool:main",
    "import-toml": "prl.import_toml.main:main",
    "bench config": "prl.bench.config:main",
    "dashboard": "prl.dashboard.main:main",
    "eval compare": "prl.evals.compare:main",
    "bench tracking": "prl.bench.tracking:main",
    "watch": "prl.monitor.watch:main",
    "status": "prl.monitor.status:main",
    "doctor": "prl.monitor.doctor:main",
    "bench orchestrator": "prl.bench.orchestrator:main",
    "bench trainer": "prl.bench.trainer:main",
    "bench inference": "prl.bench.inference:main",
    "bench sync": "prl.bench.sync:main",
    "bench sft": "prl.bench.sft:main",
    "bench ckpt": "prl.bench.ckpt:main",
}
"""Tool (one word or two) -> the function that reads the words after it and gives an exit code."""

REFUSED = 2
INTERRUPTED = 130
UNREAD = 141
"""As a program that SIGPIPE ended: what it had to say was not wanted to its end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    try:
        code = _answer(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:  # a run answers Ctrl-C itself: nothing has been started yet, or all is over
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _reader_left():
            raise
        return UNREAD


def _reader_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as after `| head`. It is closed then."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    gone = any(event & select.POLLERR for _, event in watch.poll(0))
    if gone:
        from prl.tracking.terminal import leave_pipe

        leave_pipe()
    return gone


def _answer(words: list[str]) -> int:
    # Here, so that Ctrl-C while they are imported is answered too.
    from prl.config.command_line import parse
    from prl.config.errors import ConfigErrors
    from prl.config.eval_line import expand

    for length in (2, 1):
        if (tool := " ".join(words[:length])) in TOOLS:
            return int(_load(TOOLS[tool])(words[length:]))
    gc.disable()  # composing makes many small objects and no garbage; a tenth of its time is saved
    try:
        return _run(parse(expand(words), list(COMMANDS), list(TOOLS)), words)
    except ConfigErrors as errors:
        print(errors, file=sys.stderr)
        return REFUSED
    finally:
        gc.enable()


def _run(line: CommandLine, words: Sequence[str]) -> int:
    if "--version" in line.flags:
        return _print_version()
    if "--help" in line.flags:
        from prl.config.reference import help_text

        print(help_text(line.command, list(COMMANDS), line.config_dirs))
        return 0
    if line.hydra_flags or line.multirun:
        from prl.config import hydra_app

        return hydra_app.sweep(line, job_of(line.command)) if line.multirun else hydra_app.show(line)
    from prl.config.compose import compose_job

    config = compose_job(line.command, line.overrides, line.config_dirs, line.config_name)
    return job_of(line.command)(config, words)


def job_of(command: str) -> Callable[[Any, Sequence[str]], int]:
    """The function that runs a config of `command`, made by the given words, and gives an exit code."""

    def job(config: Any, words: Sequence[str]) -> int:
        gc.freeze()  # what composing left behind lives as long as the process: not worth looking through
        gc.enable()
        if config.cluster.name == "slurm" and not _in_a_job():
            return int(_load("launchers.slurm.submit:submit")(command, config, list(words)))
        run = _load(COMMANDS[command])
        return int(run(config, shlex.join(["python", "-m", "prl", *words])))

    return job


def _in_a_job() -> bool:
    """Whether this process is a task of the job that runs its command; inside of some job is not enough."""
    from launchers.site import Site, current_site

    return type(current_site()) is not Site


def _load(target: str) -> Callable[..., Any]:
    """The function at `module:function`."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def _print_version() -> int:
    from prl import __version__

    print(f"prl {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

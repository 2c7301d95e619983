"""Lines of logs and of the terminal: the one place that writes them, as text or JSON, and reads them back.

`log.format=text`: `HH:MM:SS LEVEL name message`, a traceback on the lines below it.
`log.format=json`: one flat object a line,

    {"time": "2026-11-30T21:13:36.120+00:00", "level": "INFO", "process": "trainer/0", "pid": 4711,
     "logger": "prl.trainer.main", "message": "…", "exception": "Traceback …"}

with `exception` where there is one. What is written past Python's logging (a crash in C, what a library
prints) stays what it is: readers take both forms in one file, and the stamps of vLLM, DeepSpeed and glog too.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from prl.config.schema import LogConfig

TEXT, TIME = "%(asctime)s %(levelname)s %(name)s %(message)s", "%H:%M:%S"
OWN = ("prl", "launchers")
"""Loggers that `log.level` is for; other packages speak from warnings on."""
_LEVELS = {"W": "WARNING", "E": "ERROR", "F": "CRITICAL", "I": "INFO"}
_CLOCK = r"(?P<clock>\d\d:\d\d:\d\d)"
_LEVEL = r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
_STAMPS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"{_CLOCK} +{_LEVEL} ",
        rf"(?:\([^)]*\) )?{_LEVEL} \d\d-\d\d {_CLOCK} ",  # vLLM
        rf"\[\d{{4}}-\d\d-\d\d {_CLOCK}[.,]\d+\] \[{_LEVEL}\] ",  # DeepSpeed
        rf"\[?(?P<level>[IWEF])\d{{4}} {_CLOCK}[.,]\d+ ",  # glog: torch's C++ and NCCL
    )
)


@dataclass(frozen=True)
class LogLine:
    """A line with a stamp. `clock`: seconds after midnight where it was written; `more`: lines below it."""

    clock: int
    level: str
    text: str
    more: tuple[str, ...] = ()


class JsonFormatter(logging.Formatter):
    """Records of the process named `process` as JSON objects."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": _moment(record.created),
            "level": record.levelname,
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            told["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            told["stack"] = record.stack_info
        return json.dumps(told, ensure_ascii=False)


def formatter(log: LogConfig, process: str) -> logging.Formatter:
    """What writes the lines of a process as `log.format` wants them."""
    return JsonFormatter(process) if log.format == "json" else logging.Formatter(TEXT, TIME)


def level_of(log: LogConfig, process: str) -> str:
    """Level of a process (`trainer/0`): what `log.levels` has for it or for its kind, else `log.level`."""
    kind = process.partition("/")[0]
    return str(log.levels.get(process, log.levels.get(kind, log.level))).upper()


def configure(log: LogConfig, process: str) -> None:
    """Log to stderr: prl from the level of `process` on, other packages from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log, process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in OWN:
        logging.getLogger(name).setLevel(level_of(log, process))
    logging.captureWarnings(True)


def log_uncaught() -> None:
    """What nothing caught, in any thread, becomes a line like others; the exit code stays what it is."""
    logger = logging.getLogger("launchers")

    def tell(kind: Any, error: Any, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            logger.critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))

    def tell_of_thread(told: threading.ExceptHookArgs) -> None:
        if told.exc_type is not SystemExit:
            tell(told.exc_type, told.exc_value, told.exc_traceback)

    sys.excepthook, threading.excepthook = tell, tell_of_thread


def dict_config(process: str, logger: str, level: str) -> dict[str, Any]:
    """The same JSON lines for a package that configures its own logger from a `dictConfig`."""
    handler = {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}
    own = {"handlers": ["stderr"], "level": level, "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": "prl.log_lines.JsonFormatter", "process": process}},
        "handlers": {"stderr": handler},
        "loggers": {logger: own},
    }


def event(text: str, **fields: Any) -> str:
    """A JSON line of the launcher's own on its terminal; `fields` that are None are left out."""
    head = {"time": _moment(datetime.now().timestamp()), "level": "INFO", "process": "launcher"}
    told = {name: value for name, value in fields.items() if value is not None}
    return json.dumps({**head, "message": text, **told}, ensure_ascii=False)


def read_line(text: str) -> LogLine | None:
    """A line of a log file; None where it has no stamp, because it belongs to the one above it."""
    if text.startswith("{"):
        return _from_json(text)
    for pattern in _STAMPS:
        if stamp := pattern.match(text):
            level = _LEVELS.get(stamp["level"], stamp["level"])
            return LogLine(_seconds(stamp["clock"]), level, text[stamp.end() :])
    return None


def readable(lines: Iterable[str]) -> list[str]:
    """Lines as people read them: JSON becomes text, with its traceback below; everything else stays."""
    shown = []
    for text in lines:
        line = _from_json(text) if text.startswith("{") else None
        if line is None:
            shown.append(text)
        else:
            clock = f"{line.clock // 3600:02}:{line.clock // 60 % 60:02}:{line.clock % 60:02}"
            shown += [f"{clock} {line.level} {line.text}", *line.more]
    return shown


def _from_json(text: str) -> LogLine | None:
    try:
        told = json.loads(text)
        clock = _seconds(str(told["time"])[11:19])
        words = [str(told[name]) for name in ("logger", "message") if name in told]
        level = str(told["level"])
    except (ValueError, KeyError, TypeError):  # something else that begins with a brace
        return None
    first, *rest = " ".join(words).split("\n")
    more = [line for name in ("exception", "stack") for line in str(told.get(name, "")).splitlines()]
    return LogLine(clock, level, first, (*rest, *more))


def _seconds(clock: str) -> int:
    hours, minutes, seconds = map(int, clock.split(":"))
    return hours * 3600 + minutes * 60 + seconds


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")

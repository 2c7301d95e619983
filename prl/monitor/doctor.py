"""`prl doctor <run>`: what is likely wrong with a run, why one may think so, and the one knob to try."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from prl.monitor.findings import Finding
from prl.monitor.learning import LEARNING
from prl.monitor.observed import Observed, find_run, observe
from prl.monitor.running import RUNNING

ORDER = {"down": 0, "trouble": 1, "notice": 2}
REFUSED = 2


def main(words: Sequence[str]) -> int:
    """The tool; 0 if nothing is wrong beyond notices, 1 if something is, 2 without a run."""
    parser = argparse.ArgumentParser(prog="prl doctor", description=__doc__)
    parser.add_argument("run", help="run directory, or the name of a run in outputs")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(list(words))
    try:
        observed = observe(find_run(options.run))
    except ValueError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return REFUSED
    found = diagnose(observed)
    if options.json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        print(report(observed, found))
    return int(any(finding.severity != "notice" for finding in found))


def diagnose(observed: Observed) -> list[Finding]:
    """Findings of every diagnosis, the gravest first."""
    found = [finding for check in (*RUNNING, *LEARNING) if (finding := check(observed)) is not None]
    return sorted(found, key=lambda finding: ORDER[finding.severity])


def report(observed: Observed, found: Sequence[Finding]) -> str:
    """The findings as text."""
    head = (
        f"{observed.name}, attempt {observed.run.attempt}, step {observed.step}/{observed.max_steps or '∞'}"
    )
    if not found:
        return f"{head}: {len(RUNNING) + len(LEARNING)} checks found nothing"
    lines = [f"{head}:"]
    for finding in found:
        lines += ["", f"{finding.severity.upper():8}{finding.name}", f"        {finding.evidence}"]
        lines.append(f"        try {finding.knob}")
    return "\n".join(lines)

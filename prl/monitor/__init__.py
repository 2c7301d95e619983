"""Looking at runs from outside: `prl watch`, `prl status`, `prl doctor`, and the endpoints of each process.

The tools only read run directories; they work on a live run, a finished one, and a copy of either.
"""

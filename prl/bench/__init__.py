"""Benchmarks: `python -m prl bench <name>`, one module each."""

"""Tasksets that work offline, each a verifiers module: its id is its file name."""

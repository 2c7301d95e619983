"""Checkpoints: sharded save and load, completion markers, retention, resume and export.

Import from the modules. `marker`, `retention` and `resolve` are light (no torch): the launcher uses them.
"""

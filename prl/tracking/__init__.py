"""Tracking: JSON lines first (`stream`), read by tails (`reader`), mirrored to the terminal and to MLflow.

Import from the modules; only `mlflow_run` and `mlflow_store` import mlflow, and they do so when they connect.
"""

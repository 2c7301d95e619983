"""Environments: tasks, rewards and rollouts. The only package that imports verifiers and renderers."""

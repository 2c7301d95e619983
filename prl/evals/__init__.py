"""Evaluation: rollouts of fixed tasks, a ledger that survives interruption, and honest statistics."""

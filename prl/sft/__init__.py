"""Supervised fine-tuning, on the trainer of `prl rl`."""

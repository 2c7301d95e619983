"""The trainer: one exact optimizer step per batch, on any number of ranks, at any ZeRO stage."""

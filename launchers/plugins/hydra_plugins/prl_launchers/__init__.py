"""Hydra plugins of prl: the SLURM launcher, the local one, and the Optuna sweeper."""

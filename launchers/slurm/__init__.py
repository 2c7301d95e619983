"""SLURM through submitit: a run as one job, a sweep as one array; what a task of such a job does."""

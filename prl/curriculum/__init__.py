"""Curricula: which task comes next (samplers) and which finished groups are trained (gates)."""

from prl.curriculum.base import Curriculum, Sampler, Task, build_curriculum

__all__ = ["Curriculum", "Sampler", "Task", "build_curriculum"]

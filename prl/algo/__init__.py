"""Credit: what each token of a rollout earns, and which loss component it enters. One file an algorithm."""

from prl.algo.base import ALGORITHMS, Algorithm, Scorer, Services, algorithm_class, build_algorithm

__all__ = ["ALGORITHMS", "Algorithm", "Scorer", "Services", "algorithm_class", "build_algorithm"]

"""The losses written out for one token at a time, in float64 and without autograd.

Each function gives (loss, d loss / d lp) of one token with learner logprob lp, behaviour logprob b,
advantage a and weight w. Nothing here is shared with prl.
"""

from __future__ import annotations

from math import exp, log


def ipo(lp, b, a, w=1.0, eps=0.3, tau=1.0, cap=1e4):
    if abs(exp(lp) - exp(b)) > eps:
        return 0.0, 0.0
    value = -w * tau * a * min(exp(lp - b), cap)
    return value, value


def icepop(lp, b, a, w=1.0, low=0.2, high=5.0, tau=1.0):
    ratio = exp(lp - b)
    if not low <= ratio <= high:
        return 0.0, 0.0
    return -w * tau * a * ratio, -w * tau * a * ratio


def ppo(lp, b, a, w=1.0, low=0.8, high=1.2, tau=1.0, cap=1e4):
    ratio = exp(lp - b)
    plain = tau * a * min(ratio, cap)
    clipped = tau * a * min(max(ratio, low), high)
    if clipped < plain:
        return -w * clipped, 0.0
    return -w * plain, -w * plain


def cispo(lp, b, a, w=1.0, low=0.0, high=5.0, tau=1.0):
    weight = min(max(exp(lp - b), low), high)
    return -w * weight * tau * a * lp, -w * weight * tau * a


def one_sided(lp, b, a, w=1.0):
    if exp(lp) - exp(b) < -0.2:
        return 0.0, 0.0
    value = -w * a * min(exp(lp - b), 1e4)
    return value, value


def cross_entropy(lp, w=1.0):
    return -w * lp, -w


def mismatch_kl(lp, b):
    return exp(lp - b) - (lp - b) - 1


BY_NAME = {"ipo": ipo, "icepop": icepop, "ppo": ppo, "cispo": cispo, "one_sided": one_sided}

WORKED = [
    # P, B, a, rho, k, ipo, icepop, ppo, cispo
    (0.5, 0.4, +1, 1.25, 0.026856, -1.25, -1.25, -1.2, +0.866434),
    (0.9, 0.4, +1, 2.25, 0.439070, 0, -2.25, -1.2, +0.237061),
    (0.05, 0.5, -1, 0.1, 1.402585, 0, 0, +0.8, -0.299573),
    (0.5, 0.05, +1, 10, 6.697415, 0, 0, -1.2, +3.465736),
    (0.02, 0.2, +1, 0.1, 1.402585, -0.1, 0, -0.1, +0.391202),
    (0.001, 0.0001, -1, 10, 6.697415, +10, 0, +10, -34.538776),
]


def worked_inputs():
    """(logprobs, behaviour logprobs, advantages) of the worked vectors."""
    return [log(row[0]) for row in WORKED], [log(row[1]) for row in WORKED], [float(row[2]) for row in WORKED]

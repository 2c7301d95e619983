"""Rules between fields: which apply to which job. Each is a small function that yields what it finds.

Rules about one field alone (bounds, choices, types) live with the field in the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prl.config import rules_cluster, rules_eval, rules_monitor, rules_online_eval, rules_serving, rules_sft
from prl.config import rules_rl as rl
from prl.config import rules_sampling as sampling
from prl.config import rules_teacher as teacher
from prl.config import rules_training as training
from prl.config.env_vars import names_are_free
from prl.config.errors import Problem
from prl.config.schema import ExportConfig

Rule = Callable[[Any], Iterator[Problem]]


def check(command: str, config: Any) -> list[Problem]:
    """Problems and warnings of a typed config of `command`, each once."""
    found: list[Problem] = []
    for rule in [*RULES[command], *rules_cluster.rules_of(command)]:
        for problem in rule(config):
            if problem not in found:
                found.append(problem)
    return found


def export_has_a_source(config: ExportConfig) -> Iterator[Problem]:
    for path in ("run", "out"):
        value = getattr(config, path)
        if value is not None and not value.strip():
            yield Problem(path, value, "a directory is needed", "The current one is `.`.")
    if config.run.strip() and not Path(config.run).expanduser().is_dir():
        yield Problem(
            "run", config.run, "no such directory", "Give a run directory, e.g. run=outputs/<run.name>."
        )


TRAINING_RULES: list[Rule] = [
    training.model_is_there,
    training.renderer_is_named,
    training.schedule_fits_the_run,
    training.zero_stage_allows,
    training.rows_can_be_shared,
    training.activations_fit,
    training.adapters_have_targets,
    training.betas_are_two,
    training.checkpoints_happen,
    training.tracking_store_is_safe,
    *rules_monitor.RULES,
    training.run_has_a_place,
    training.resume_is_clear,
    names_are_free,
]

RULES: dict[str, list[Rule]] = {
    "rl": [
        rl.environments_are_named,
        rules_eval.tasksets_are_installed,
        rules_eval.selections_are_readable,
        rl.batches_hold_whole_groups,
        rl.groups_fit_in_flight,
        rl.bounds_in_flight_are_ordered,
        rl.groups_have_peers,
        sampling.sampling_is_what_the_learner_models,
        sampling.extra_keys_have_no_field,
        rl.completions_leave_room,
        rl.rows_hold_the_context,
        rl.algorithms_are_complete,
        teacher.teachers_are_there,
        rl.hierarchies_have_agents,
        rl.token_weights_agree,
        rl.distillation_samples_at_one,
        rl.loss_bounds_are_ordered,
        rl.curricula_are_sound,
        rl.engine_has_an_address,
        *rules_online_eval.RULES,
        *rules_serving.RULES,
        rules_serving.broadcasts_reach_the_engines,
        *TRAINING_RULES,
    ],
    "sft": [*rules_sft.RULES, rules_eval.selections_are_readable, *rules_online_eval.RULES, *TRAINING_RULES],
    "eval": [*rules_eval.RULES, names_are_free, *rules_serving.RULES, sampling.extra_keys_have_no_field],
    "export": [export_has_a_source],
    "inference": [
        training.model_is_there,
        names_are_free,
        rules_serving.server_has_a_model,
        rules_monitor.log_levels_are_of_processes,
        *rules_serving.RULES,
    ],
}

"""`launch_tracked.py <output dir> <roles as JSON> <resume>`: a tracked launch with stand-ins as roles."""

import json
import sys
from pathlib import Path

import launchers.placement
import launchers.run
from launchers.placement import Role
from prl.config.algo import GrpoConfig
from prl.config.loss import IpoConfig
from prl.config.schema import LogConfig, RlConfig, RunConfig
from prl.config.serving import ClusterConfig, EmbeddedConfig, MlflowConfig
from prl.config.sources import EnvConfig
from prl.config.training import AdamWConfig, ModelConfig, SchedulerConfig

PATIENCE = 400.0
"""The machine may be busy; the test is about what is told, not about how soon."""
DUMMY = Path(__file__).parents[1] / "launchers" / "dummy_role.py"


def main(output_dir: str, roles: str, resume: str) -> int:
    def place(command: str, config: RlConfig, resolved: Path, gpus: list[str]) -> list[Role]:
        run = str(resolved.parents[2])
        found = json.loads(roles)
        words = {name: [part.replace("RUN", run) for part in rest] for name, _, *rest in found}
        start = (sys.executable, "-S", str(DUMMY))
        return [Role(name, kind, (*start, *words[name])) for name, kind, *_ in found]

    launchers.placement.place = place
    launchers.run.FLUSH_SECONDS = dict.fromkeys(launchers.run.FLUSH_SECONDS, PATIENCE)
    config = RlConfig(
        algo=GrpoConfig(),
        loss=IpoConfig(),
        model=ModelConfig(name="tiny"),
        env={"reverse_text": EnvConfig()},
        optim=AdamWConfig(),
        scheduler=SchedulerConfig(),
        inference=EmbeddedConfig(),
        tracking=MlflowConfig(),
        cluster=ClusterConfig(grace=1.0),
        run=RunConfig(name="r", resume=resume or None),
        log=LogConfig(display="none"),
        max_steps=10_000,
        output_dir=output_dir,
    )
    return launchers.run.launch_rl(config, ["prl", "optim.lr=1e-4"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

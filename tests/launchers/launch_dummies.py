"""`launch_dummies.py <output dir> <roles as JSON> [display] [grace]`: a launch with stand-ins as roles."""

import json
import sys
from pathlib import Path

import launchers.placement
import launchers.run
from launchers.placement import Role
from prl.config.algo import GrpoConfig
from prl.config.loss import IpoConfig
from prl.config.schema import LogConfig, RlConfig, RunConfig
from prl.config.serving import ClusterConfig, EmbeddedConfig, TrackingConfig
from prl.config.sources import EnvConfig
from prl.config.training import AdamWConfig, ModelConfig, SchedulerConfig

DUMMY = Path(__file__).with_name("dummy_role.py")


def main(output_dir: str, roles: str, display: str = "plain", grace: str = "1") -> int:
    def place(command: str, config: RlConfig, resolved: Path, gpus: list[str]) -> list[Role]:
        run = str(resolved.parents[2])
        return [
            Role(
                name,
                kind,
                (sys.executable, "-S", str(DUMMY), *[part.replace("RUN", run) for part in behaviour]),
            )
            for name, kind, *behaviour in json.loads(roles)
        ]

    launchers.placement.place = place
    config = RlConfig(
        algo=GrpoConfig(),
        loss=IpoConfig(),
        model=ModelConfig(name="tiny"),
        env={"reverse_text": EnvConfig()},
        optim=AdamWConfig(),
        scheduler=SchedulerConfig(),
        inference=EmbeddedConfig(),
        tracking=TrackingConfig(),
        cluster=ClusterConfig(grace=float(grace)),
        run=RunConfig(name="r"),
        log=LogConfig(display=display),
        output_dir=output_dir,
    )
    return launchers.run.launch_rl(config, ["prl", "optim.lr=1e-4"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

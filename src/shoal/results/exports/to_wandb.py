"""Runs of Weights & Biases, offline unless the user has set another mode."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from shoal.errors import DataError
from shoal.results.exports.points import Point
from shoal.results.exports.run_info import RunInfo, plain_name, summary_values

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # W&B would send errors to its server, also when offline

import wandb


class WandbTarget:
    """Writes one run of the W&B project with the name of the experiment, below `out/wandb`."""

    errors: ClassVar[tuple[type[Exception], ...]] = (wandb.Error,)

    def __init__(self, out: Path, run: RunInfo) -> None:
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        id, project = (plain_name(text).replace("/", "_") for text in (run.id, run.name))
        earlier = next(out.glob(f"wandb/*run-*-{id}"), None)
        if earlier is not None:
            raise DataError(
                f"{earlier} already has an export of this run; remove this folder to export it again, or choose "
                "another one with --out"
            )
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # W&B would choose another folder
        self._wandb = wandb.init(
            project=project,
            id=id,
            name=run.id,
            dir=str(out),
            mode=mode,
            config=dict(run.parameters),
            tags=[f"{key}={value}" for key, value in run.tags.items() if key != "shoal.run"],
            resume="never" if mode == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
            ),
        )
        self._wandb.define_metric("*", step_metric="step")
        folder = Path(self._wandb.settings.sync_dir)
        self.place = f"{folder}; send it with: wandb sync {folder}" if mode == "offline" else str(self._wandb.url)

    def write(self, points: Iterable[Point]) -> None:
        for point in points:
            self._wandb.log({**point.values, "step": point.step, "time": point.time})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._wandb.summary.update({**summary_values(summary), "status": summary.get("status")})

    def close(self) -> None:
        self._wandb.finish()
        wandb.teardown()  # waits for the service of W&B, which may still write the file after `finish`

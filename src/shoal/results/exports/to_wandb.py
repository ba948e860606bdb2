"""Runs of Weights & Biases, offline unless the user has set another mode."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from shoal.errors import DataError
from shoal.results.exports.points import Point
from shoal.results.exports.run_info import RunInfo, plain_name, summary_values

MODE = os.environ.get("WANDB_MODE", "offline")
if MODE == "offline":
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # W&B would report its own errors to a server

import wandb  # noqa: E402


class WandbTarget:
    """Writes one run of the W&B project with the name of the experiment, below `out/wandb`."""

    errors: ClassVar[tuple[type[Exception], ...]] = (wandb.Error,)

    def __init__(self, out: Path, run: RunInfo) -> None:
        self._last_step = 0
        id, project = (plain_name(text).replace("/", "_") for text in (run.id, run.name))
        earlier = next(out.glob(f"wandb/*run-*-{id}"), None)
        if earlier is not None:
            raise DataError(
                f"{earlier} already has an export of this run; remove this folder to export it again, or choose "
                "another one with --out"
            )
        out.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb.init(
            project=project,
            id=id,
            name=run.id,
            dir=str(out),
            mode=MODE,  # type: ignore[arg-type]
            config=dict(run.parameters),
            tags=[f"{key}={value}" for key, value in run.tags.items() if key != "shoal.run"],
            resume="never" if MODE == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
            ),
        )
        self._wandb.define_metric("*", step_metric="step")
        folder = Path(self._wandb.settings.sync_dir)
        self.place = f"{folder}; send it with: wandb sync {folder}" if MODE == "offline" else str(self._wandb.url)

    def write(self, points: Iterable[Point]) -> None:
        for point in points:
            self._last_step = max(self._last_step, point.step)
            self._wandb.log({**point.values, "step": point.step, "time": point.time})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._wandb.summary.update({**summary_values(summary), "status": summary.get("status")})

    def close(self) -> None:
        self._wandb.finish()

"""Problems of experiments, and a file with plug-ins."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ExperimentError
from shoal.experiment import Experiment


def problems(table: dict[str, Any], overrides: dict[str, Any] | None = None, base: Path = Path(".")) -> tuple[str, ...]:
    with pytest.raises(ExperimentError) as caught:
        Experiment.from_table(table, overrides, base=base)
    return caught.value.problems


PLUGIN = textwrap.dedent(
    '''
    from dataclasses import dataclass
    from typing import Annotated

    from shoal.types import Bounds

    @dataclass(frozen=True)
    class Mine:
        """A user's own algorithm."""

        alpha: Annotated[float, Bounds(at_least=0, at_most=1)] = 0.5

        async def run(self, node):
            async for _ in node.rounds(1):
                pass

    def function(): ...
    '''
)

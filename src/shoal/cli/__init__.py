"""The command line: commands, live progress and tables, and the plug-ins that `shoal new` writes.

The package may import every other package except `testing`.
"""

from __future__ import annotations

from shoal.cli.main import main

__all__ = ["main"]

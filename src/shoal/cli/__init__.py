"""The command line: commands, what they display, checks of the machine, and plug-in templates.

The package may import every other package.
"""

from __future__ import annotations

from shoal.cli.main import main

__all__ = ["main"]

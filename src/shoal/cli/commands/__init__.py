"""The commands: one module for each command or group of commands. Its `add_parser` declares the arguments.

The package may import every other package except `testing`. Commands import engines and PyTorch only when they need
them.
"""

from shoal.cli.commands import components, data, doctor, keys, new, results, run, topology

COMMANDS = (run, results, components, topology, data, keys, new, doctor)
"""The modules with commands, in the order of `shoal --help`."""

"""The commands: one module for each command or group of commands. Its `add_parser` declares the arguments.

The package may import every other package except `testing`. Commands import engines and PyTorch only when they need
them.
"""

from shoal.cli.commands import (
    agent,
    components,
    data,
    deploy,
    doctor,
    export_model,
    keys,
    new,
    results,
    resume,
    run,
    topology,
)

COMMANDS = (run, resume, results, export_model, components, topology, data, agent, deploy, keys, new, doctor)
"""The modules with commands, in the order of `shoal --help`."""

"""The virtual-time kernel: nodes as coroutines, exact and replayable from the seed."""

"""The engine that runs all nodes in one process, as coroutines under a virtual clock, replayable from the seed.

This package may import what `engines` may, and `engines`, `mailbox`, `runtime` and `training`. It reads no
real clock for anything that affects a result.

engine.py              one run; made of the parts below
  nodes.py             builds, starts, restarts and ends nodes
  scheduled_events.py  timed faults, availability and changes of the network
  clock_evaluations.py evaluates all models at regular times
  recorder.py          writes records, averages and final models
world.py               the runtime of a node, and what nodes share
kernel.py              the event loop with the virtual clock
compute.py             computes nodes one by one, by workers, or stacked; batching.py chooses
pool.py                starts workers as processes on this machine
"""

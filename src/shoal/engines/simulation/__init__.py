"""The simulation: nodes as coroutines under a virtual clock, exact and replayable from the seed.

The event kernel, the simulated world, and the computation of many nodes' work belong here. May import everything that
`shoal.engines` may, except `shoal.engines.processes`.
"""

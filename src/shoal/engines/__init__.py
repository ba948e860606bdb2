"""The engines that run nodes: a simulation under a virtual clock, and processes over TCP.

Code that both engines use is here: the run tracker, the order of timed events, averages of models, workers that train
for many nodes, and how a restarted node rejoins a run. The package may import the foundations, `message`, `node`,
`environment`, `experiment`, `training` and `results`. The two engines never import each other.
"""

"""The engines that run nodes: a simulation under a virtual clock, and processes over TCP.

What both engines need is here beside them: the run tracker, the order of timed events, averages of models, and how a
failed node rejoins a run. Engines may import every other package except `cli` and `testing`; the two engines never
import each other.
"""

"""Exports of runs to TensorBoard, MLflow and Weights & Biases. They read the records of a run, and nothing else.

The package imports only `results`, `errors` and `types`. The libraries of the targets are imported when they are used.
"""

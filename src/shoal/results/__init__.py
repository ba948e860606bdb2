"""Results of runs: records, progress, summaries, statistics, curves, comparisons and plots.

The package reads what a run has written; it may import the core modules, and no engine or component.
"""

"""Results of runs: records, progress, summaries, statistics, curves, comparisons and plots.

The package reads the files of a run. It may import `shoal.errors` and `shoal.types` only.
"""

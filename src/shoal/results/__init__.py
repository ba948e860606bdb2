"""Reading runs: summaries, plots. Knows records and nothing else."""

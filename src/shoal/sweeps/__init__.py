"""Sweeps: many runs of one experiment with different settings and seeds, and the search for the best settings.

The package plans combinations, runs them in processes of their own, and goes on where it stopped. It may import
`experiment`, `results` and what starts processes in `engines`. The command line imports it.
"""

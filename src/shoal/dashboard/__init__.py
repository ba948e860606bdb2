"""The web page that shows runs while they go on and afterwards: `shoal serve` and `shoal run --watch`.

The package reads the files of runs and writes nothing. It may import `results` and the foundations.
"""

"""`python -m shoal` runs the command `shoal`."""

from shoal.cli import main

main()

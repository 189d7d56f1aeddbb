"""`python -m echelon` is the same program as `echelon`."""

from echelon.cli import main

main(prog_name="echelon")

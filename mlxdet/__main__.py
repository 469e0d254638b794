"""`python -m mlxdet`: the command line."""

from mlxdet.cli import main

main()

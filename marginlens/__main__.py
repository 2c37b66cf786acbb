"""`python -m marginlens`: the command."""

from marginlens.cli import main

main()

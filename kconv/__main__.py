"""`python -m kconv` and `torchrun -m kconv`: the command line."""

from kconv.cli import main

main()

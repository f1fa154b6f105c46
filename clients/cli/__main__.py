"""`python -m artesian.clients.cli`: the command where the script is not on the path."""

from . import main

main()

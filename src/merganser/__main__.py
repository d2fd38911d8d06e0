"""`python -m merganser`."""

from merganser.cli import main

main()

"""`python -m ppd.servers`: `ppd` for parts of the project that start others, without a script on the PATH."""

from .cli.main import main

main()

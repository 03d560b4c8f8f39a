"""`python -m ppd.servers` is `ppd`: what starts another part of the project needs no script on the PATH."""

from .cli.main import main

main()

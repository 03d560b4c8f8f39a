from .command import command

command()

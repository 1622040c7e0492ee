"""The command line: one module for each command, which imports torch and matplotlib only when it runs.

Exit codes: 0 for success, 1 where ``flexmask check`` finds a difference, 2 for bad input.
"""

from flexmask.cli.check import check
from flexmask.cli.explain import explain
from flexmask.cli.group import main
from flexmask.cli.list import list_masks
from flexmask.cli.render import render

__all__ = ["main"]

main.add_command(check)
main.add_command(explain)
main.add_command(list_masks)
main.add_command(render)

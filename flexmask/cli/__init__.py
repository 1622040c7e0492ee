"""The command line: one module for each command, which imports torch and matplotlib only when it runs.

Exit codes: 0 for success, 2 for bad input.
"""

from flexmask.cli.explain import explain
from flexmask.cli.group import main
from flexmask.cli.list import list_masks
from flexmask.cli.render import render

__all__ = ["main"]

main.add_command(explain)
main.add_command(list_masks)
main.add_command(render)

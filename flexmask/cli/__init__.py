"""The command line, whose commands import torch and matplotlib only when they run.

Exit codes: 0 for success, 1 if ``flexmask check`` or ``flexmask diff`` finds a difference, 2 for bad input, 3 if a command fails
or its output cannot be written.
"""

from flexmask.cli.analyze import check, diff, explain, shard, stats
from flexmask.cli.draw import gallery, render
from flexmask.cli.group import main
from flexmask.cli.list import find_masks, list_masks

__all__ = ["main"]

for command in (check, diff, explain, find_masks, gallery, list_masks, render, shard, stats):
    main.add_command(command)

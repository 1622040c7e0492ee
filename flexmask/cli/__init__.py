"""The command line: one module for each command, which imports torch and matplotlib only when it runs.

Exit codes: 0 for success, 1 if ``flexmask check`` or ``flexmask diff`` finds a difference, 2 for bad input, 3 if a command fails
or its output cannot be written.
"""

from flexmask.cli.check import check
from flexmask.cli.diff import diff
from flexmask.cli.explain import explain
from flexmask.cli.gallery import gallery
from flexmask.cli.group import main
from flexmask.cli.list import find_masks, list_masks
from flexmask.cli.render import render
from flexmask.cli.shard import shard
from flexmask.cli.stats import stats

__all__ = ["main"]

main.add_command(check)
main.add_command(diff)
main.add_command(explain)
main.add_command(find_masks)
main.add_command(gallery)
main.add_command(list_masks)
main.add_command(render)
main.add_command(shard)
main.add_command(stats)

"""The command line in this process."""

from click.testing import CliRunner, Result

from flexmask.cli import main

#: The variables that rich reads; without these a test sees the same width and no colors wherever it runs.
PLAIN = {"COLUMNS": "80", "FORCE_COLOR": None, "TTY_COMPATIBLE": None, "TTY_INTERACTIVE": None, "NO_COLOR": None}


def run(*arguments: str) -> Result:
    return CliRunner(env=PLAIN).invoke(main, list(arguments), prog_name="flexmask")

"""The command line: see the package."""

import argparse
import sys
from pathlib import Path

import pytest
import torch

from tests.mutation.run import Options, Runner


def main() -> int:
    """Runs the mutants of the modules that are named."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="Mutation testing.")
    parser.add_argument("modules", nargs="+", type=Path, help="files of the package")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what pytest collects")
    parser.add_argument("--marks", default="not slow and not browser and not gpu", help="pytest's -m")
    parser.add_argument("--out", type=Path, default=Path("build/mutation.json"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sample", type=float, default=1.0, help="the share of the mutants that run")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for one mutant, the slowest left out first")
    parser.add_argument("--again", type=Path, help="run only the survivors in these results")
    given = parser.parse_args()
    options = Options(given.modules, given.out, given.jobs, given.sample, given.budget, given.again)
    torch.set_num_threads(1)
    arguments = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", given.marks, *given.tests]
    return int(pytest.main(arguments, plugins=[Runner(options)]))


if __name__ == "__main__":
    sys.exit(main())

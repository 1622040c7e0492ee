"""``python -m flexmask``: the command line."""

from flexmask.cli import main

if __name__ == "__main__":
    main(prog_name="flexmask")

"""`python -m triptych.apps.cli` is the `triptych` command."""

from triptych.apps.cli import main

if __name__ == "__main__":
    main()

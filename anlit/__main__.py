"""The command `anlit`, which is also `python -m anlit`."""

import os
import sys

SPINS = "10000"
"""Rounds that a CPU thread waits awake for the other threads, before it sleeps.

GNU's OpenMP, which torch has, takes 300,000. Beside other work these cost more than the training:
the thread that is waited for does not get the core.
"""


def main() -> int:
    """Run the command, and return its exit code. Ctrl-C is quiet while its modules are imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is imported
    try:
        from anlit import cli

        return cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("anlit: error: interrupted\n")
        return 130  # `anlit.errors.INTERRUPTED`, which may not be imported yet


if __name__ == "__main__":
    sys.exit(main())

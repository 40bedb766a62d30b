"""The command `anlit`, which is also `python -m anlit`."""

import sys


def main() -> int:
    """Run the command, and return its exit code. Ctrl-C is quiet while its modules are imported."""
    try:
        from anlit.commands.cpu_threads import set_thread_defaults

        set_thread_defaults()
        from anlit import cli

        return cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("anlit: error: interrupted\n")
        return 130  # `anlit.errors.INTERRUPTED`, which may not be imported yet


if __name__ == "__main__":
    sys.exit(main())

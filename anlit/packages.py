"""Optional packages: whether one is installed, and how to install it."""

from importlib.util import find_spec


def is_installed(package: str) -> bool:
    """Return whether a package is installed. It is not imported.

    A folder of its name in the working directory, such as W&B's `wandb`, is not the package.
    """
    specification = find_spec(package)
    return specification is not None and specification.origin is not None


def install_advice(extra: str, package: str) -> str:
    """Return how to install an optional package: in the repository, or beside a wheel."""
    return f"run `make extras EXTRAS={extra}`, or pip install {package}"

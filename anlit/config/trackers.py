"""The packages of experiment trackers that Lightning's loggers need."""

from anlit.errors import RunError, error_chain, first_line
from anlit.packages import install_advice, is_installed

PACKAGES = {
    "WandbLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "CometLogger": "comet_ml",
}
"""A logger → the name under which its package is imported. anlit depends on none of them."""


def explain_missing_package(logger: str) -> str:
    """Return the sentence if the package of a logger, by its class name, is missing; else ""."""
    package = PACKAGES.get(logger)
    if package is None or is_installed(package):
        return ""
    fix = install_advice("wandb", package) if package == "wandb" else f"pip install {package}"
    return f"trainer.logger={logger} needs {package}: {fix}"


def tracker_error(error: BaseException) -> RunError | None:
    """Return the sentence if a tracker's own error is in the chain, such as of a lost server."""
    for link in error_chain(error):
        package = type(link).__module__.partition(".")[0]
        if package in PACKAGES.values():
            return RunError(
                f"{package} fails ({first_line(link)}): correct that, or leave its logger out of "
                "trainer.logger, then continue with --ckpt_path last"
            )
    return None

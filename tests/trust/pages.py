"""A case of reports: the rest of letter N."""

import re

from tests.trust.place import Case, Outcome, Place

EVIL = "b\x1b[2J ![p](http://evil) <img src=http://r>"  # without a dot, after which a class's name begins


def reported(place: Place) -> Outcome:
    """A run whose model is called by Markdown, HTML and a terminal code."""
    folder = place.run
    place.change_config(lambda config: config["model"].update(class_path=f"anlit.{EVIL}"))

    def state() -> str:
        page = (place.output / "report.html").read_text()
        foreign = [one for one in re.findall(r'<img[^>]*src="?([^"> ]*)', page) if not one.startswith("data:")]
        return f"report.html loads {len(foreign)} pictures"

    outcome = place.command("compare", folder, "--baseline", folder, "--output", place.output, state=state)
    return Outcome(outcome.code, outcome.said.replace("\x1b[2J", "RAW CODE"), outcome.state)


CASES = [
    Case("N", "compare a run whose model's name is Markdown, HTML and terminal codes", reported, "0",
         r"b\\x1b\[2J", "report.html loads 0 pictures"),
]  # fmt: skip

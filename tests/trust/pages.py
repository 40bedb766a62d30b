"""Cases of reports and of the page `anlit explore`: the rest of letter N."""

import re
from functools import partial

from anlit.errors import UserError
from anlit.explore.guard import Guard
from anlit.explore.session import Session
from anlit.inference.sampling import Sampling
from tests.inference.test_explore import request
from tests.trust.place import NOTHING, Case, Outcome, Place

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


def page(place: Place, asked: dict[str, str]) -> Outcome:
    """What the guard of the page answers."""
    refusal = Guard(None, "127.0.0.1").refusal(request(**asked))
    status, said = refusal if refusal is not None else (200, "")
    return Outcome(str(status), str(said), place.facts(place.hashes()))


def long_prompt(place: Place) -> Outcome:
    before, session = place.hashes(), Session([str(place.run)], "cpu", most_tokens=20)
    try:
        session.look(next(iter(session.paths)), "the cat " * 1000, 5, Sampling(temperature=0))
    except UserError as error:
        return Outcome("message", str(error), place.facts(before))
    return Outcome("answered", "", place.facts(before))


CASES = [
    Case("N", "compare a run whose model's name is Markdown, HTML and terminal codes", reported, "0",
         r"b\\x1b\[2J", "report.html loads 0 pictures"),
    Case("N", "explore: a request with the Host of another site (status)",
         partial(page, asked={"host": "evil.example:7860"}), "421", "", NOTHING),
    Case("N", "explore: an upload (status)",
         partial(page, asked={"host": "localhost", "path": "/upload/", "method": "POST", "content_length": "10"}),
         "403", "", NOTHING),
    Case("N", "explore: a prompt beyond the bound", long_prompt, "message", "shorten the prompt", NOTHING),
]  # fmt: skip

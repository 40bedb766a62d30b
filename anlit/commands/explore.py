"""`anlit explore`: serves the page."""

import logging

from anlit.errors import UserError
from anlit.options import CommandParser


def main(argv: list[str]) -> int:
    """`anlit explore`; returns the exit status and raises UserError for the user's mistakes."""
    parser = CommandParser(
        prog="anlit explore",
        description="A page in the browser: type a prompt and see how several models continue it, the loss of each "
        "token as colour over the text, and attention statistics by layer and head. It needs Gradio: make extras "
        "EXTRAS=explore.",
        epilog="Example: anlit explore runs/gpt-seed1 runs/ngpt-seed1 runs/angpt-seed1",
    )
    add = parser.add_argument
    add("checkpoints", nargs="*", metavar="CHECKPOINT", help="shown at first: run folder, .ckpt file, exported folder")
    add("--runs", default="runs", metavar="DIR", help="whose run folders can be chosen too (default: runs)")
    add("--host", default="127.0.0.1", help="address to serve at; 0.0.0.0 for other machines (default: 127.0.0.1)")
    add("--port", type=int, default=7860, help="(default: 7860)")
    add("--tokenizer", metavar="FILE", help="tokenizer.json (default: that of each checkpoint's data)")
    add("--most_tokens", type=int, default=4096, metavar="N", help="prompt and continuation together (default: 4096)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    given = parser.parse_args(argv)
    if given.most_tokens < 1:
        raise UserError(f"--most_tokens must be at least 1, not {given.most_tokens}")
    logging.basicConfig(format="%(message)s")

    from anlit.explore.session import Session, find_runs

    runs = [run for run in find_runs(given.runs) if run not in given.checkpoints]
    session = Session([*given.checkpoints, *runs], given.device, given.tokenizer, given.most_tokens)
    chosen = list(session.paths)[: len(given.checkpoints)]
    for name in chosen:
        session.load(name)

    from anlit.explore import page

    print(f"anlit explore: http://{given.host}:{given.port} (Ctrl-C ends it)")
    try:
        page.serve(session, chosen, given.host, given.port)
    except OSError as error:
        raise UserError(f"--port {given.port} of {given.host} cannot be served ({error}): choose another") from error
    return 0

"""`anlit explore`: serves the page."""

import logging

from anlit.checkpoints.location import require_path
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
    add("--runs", default="runs", metavar="DIR", help="folder of more runs to choose from (default: runs)")
    add("--host", default="127.0.0.1", help="address to serve at; 0.0.0.0 for other machines (default: 127.0.0.1)")
    add("--port", type=int, default=7860, help="(default: 7860)")
    add("--tokenizer", metavar="FILE", help="tokenizer.json (default: that of each checkpoint's data)")
    add("--most_tokens", type=int, default=4096, metavar="N", help="prompt and continuation together (default: 4096)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    arguments = parser.parse_args(argv)
    for checkpoint in arguments.checkpoints:
        require_path(checkpoint)
    if arguments.most_tokens < 1:
        raise UserError(f"--most_tokens must be at least 1, not {arguments.most_tokens}")
    logging.basicConfig(format="%(message)s")

    from anlit.explore.session import Session, find_runs

    runs = [run for run in find_runs(arguments.runs) if run not in arguments.checkpoints]
    session = Session([*arguments.checkpoints, *runs], arguments.device, arguments.tokenizer, arguments.most_tokens)
    chosen = list(session.paths)[: len(arguments.checkpoints)]
    for name in chosen:
        session.load(name)

    from anlit.explore import page

    print(f"anlit explore: http://{arguments.host}:{arguments.port} (Ctrl-C ends it)")
    try:
        page.serve(session, chosen, arguments.host, arguments.port)
    except OSError as error:
        raise UserError(
            f"--port {arguments.port} of {arguments.host} cannot be served ({error}): choose another"
        ) from error
    return 0

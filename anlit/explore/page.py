"""The page, built of Gradio's components."""

import logging
import math
from typing import Any

from anlit.errors import UserError
from anlit.evaluation.diagnose.plot import TITLES, head_maps
from anlit.explore.guard import Guard
from anlit.explore.session import Piece, Session, Stopped, View
from anlit.inference.sampling import Sampling
from anlit.reporting.text import literal

try:
    import gradio as gr
    from starlette.middleware import Middleware
except ImportError as error:
    raise UserError("anlit explore needs gradio: run `make extras EXTRAS=explore`") from error

INTRODUCTION = (
    "# anlit explore\n"
    "Continue a prompt with several models. Colour is the loss of each token: white for 0 nats, full red for that of a "
    "guess among all tokens."
)
PROMPT = "import os\n\n\ndef main("
# Show tokens as running text; Gradio would show each as a separate tag.
STYLE = """
.loss .textfield { display: block; line-height: 1.5; font-family: ui-monospace, monospace; font-size: 13px; }
.loss .token { padding: 1px 0 !important; margin: 0 !important; border-radius: 0 !important; }
"""
# Nothing is fetched from other servers, not even fonts.
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}

_log = logging.getLogger("anlit.explore")


def build(session: Session, chosen: list[str]) -> gr.Blocks:
    """The page.

    Args:
        session: The models to choose from.
        chosen: Names of the models that are selected at first.
    """
    with gr.Blocks(title="anlit explore", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION)
        names = gr.Dropdown(list(session.paths), value=chosen, multiselect=True, label="Models")
        info = f"One document; the model continues it. At most {session.most_tokens:,} tokens with the continuation."
        prompt = gr.Textbox(PROMPT, lines=4, max_lines=12, label="Prompt", info=info)
        with gr.Row():
            settings = _settings(session.most_tokens)
        with gr.Row():
            button = gr.Button("Continue", variant="primary")
            stop = gr.Button("Stop", variant="stop")
        views = gr.State([])
        _texts(views)
        titles = [(title, name) for name, title in TITLES.items()]
        statistic = gr.Dropdown(titles, label="Attention by layer and head, mean over the tokens of the whole text")
        plot = gr.Plot(show_label=False, visible=False)

        def look(names: list[str], prompt: str, *numbers: float) -> list[View]:
            return _look(session, names, prompt, *numbers)

        button.click(look, [names, prompt, *settings], views, api_name="look").then(_plot, [views, statistic], plot)
        stop.click(session.stop, api_name="stop", queue=False)
        statistic.change(_plot, [views, statistic], plot)
    return page


def _settings(most_tokens: int) -> list[Any]:
    return [
        gr.Number(100, label="Tokens", precision=0, minimum=0, maximum=most_tokens, info="0: only measure the prompt"),
        gr.Slider(0, 2, 0.8, step=0.05, label="Temperature", info="0: the most probable token"),
        gr.Number(0, label="Top k", precision=0, minimum=0, info="0: all tokens"),
        gr.Slider(0.05, 1, 0.95, step=0.05, label="Top p", info="1: all tokens"),
        gr.Number(0, label="Seed", precision=0, minimum=0, info="the same for all models"),
    ]


def _look(
    session: Session,
    names: list[str],
    prompt: str,
    n: float,
    temperature: float,
    top_k: float,
    top_p: float,
    seed: float,
) -> list[View]:
    found: list[View] = []
    try:
        if not names:
            raise UserError("no model is chosen: choose one or several under Models")
        sampling = Sampling(temperature, int(top_k) or None, top_p if top_p < 1 else None, int(seed))
        session.begin()
        for name in names:
            found.append(session.look(name, prompt, int(n), sampling))
        return found
    except Stopped:
        return found  # the models that are done
    except UserError as error:
        _log.info(str(error))
        raise gr.Error(str(error), print_exception=False) from error


def _texts(views: gr.State) -> None:
    """A column per model, rebuilt for every result."""

    @gr.render(inputs=views)
    def show(found: list[View]) -> None:
        with gr.Row():
            for view in found:
                with gr.Column(min_width=280):
                    gr.Markdown(f"### {literal(view.label)}\n{literal(view.name)}, step {view.step:,}")
                    _coloured(view.prompt, "Prompt", view.losses[0], view.n_tokens[0], view.guess)
                    if view.n_tokens[1]:
                        name = "Continuation, ended by the model" if view.ended else "Continuation"
                        _coloured(view.continuation, name, view.losses[1], view.n_tokens[1], view.guess)
                    elif view.ended:
                        gr.Markdown("The model ends the document here.")


def _coloured(pieces: list[Piece], name: str, loss: float, n_tokens: int, guess: float) -> None:
    shown: list[tuple[str, float | None]] = []
    for piece in pieces:
        strength = 0.0 if math.isnan(piece.loss) else min(1.0, piece.loss / guess)
        first, *lines = piece.text.split("\n")
        shown += [(first, strength)] if first else []
        for line in lines:  # a line break cannot be coloured, so a sign stands for it
            shown += [("↵", strength), ("\n", None), *([(line, strength)] if line else [])]
    label = f"{name}: {loss:.3f} nats per token, {n_tokens:,} token{'s' if n_tokens > 1 else ''}"
    gr.HighlightedText(shown, label=label, show_legend=False, interactive=False, elem_classes="loss")


def _plot(views: list[View], statistic: str) -> Any:
    if not views:
        return gr.skip()
    maps = {f"{view.label}\n{view.name}": view.attention[statistic] for view in views}
    return gr.Plot(head_maps(maps, statistic), visible=True)


def serve(session: Session, chosen: list[str], host: str, port: int) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        OSError: The port is taken.
    """
    launch(session, chosen, host, port).block_thread()


def launch(session: Session, chosen: list[str], host: str, port: int) -> gr.Blocks:
    """Serve the page in threads of this process, behind the `Guard`. It is not published elsewhere.

    Raises:
        OSError: The port is taken.
    """
    page = build(session, chosen)
    page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        theme=gr.themes.Default(**FONTS),
        css=STYLE,
        footer_links=[],
        # Gradio would take these from environment variables.
        share=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        app_kwargs={"middleware": [Middleware(Guard, host=host)]},
    )
    return page

"""Conversations as text, by the chat template of a tokenizer: what transformers' `apply_chat_template` renders."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anlit.errors import UserError

Message = Mapping[str, Any]
"""`role` (system, user, assistant) and `content`."""


def messages_of(text: str) -> list[Message]:
    """The conversation that `text` is: a JSON list of messages with role and content, else one message of a user."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, list) and value and all(_is_message(entry) for entry in value):
        return value
    return [{"role": "user", "content": text}]


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("role"), str) and "content" in entry


def render_chat(
    template: str, messages: Sequence[Message], tokens: Mapping[str, str], is_answered: bool
) -> str:
    """The text of a conversation.

    Args:
        template: In jinja, as tokenizer_config.json has it. It runs in jinja's sandbox.
        tokens: The texts of special tokens, such as `bos_token`.
        is_answered: Whether the conversation is complete. Otherwise the text ends where an answer begins.

    Raises:
        UserError: The template is no jinja, or refuses this conversation.
    """
    values = {"messages": list(messages), "tools": None, "documents": None, **tokens}
    try:
        rendered = _environment().from_string(template)
        return rendered.render(values, add_generation_prompt=not is_answered)
    except Exception as error:  # a template may fail in every way that Python can
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"the chat template does not render this conversation ({reason}): change its messages, or leave out --chat"
        ) from error


def _environment() -> Environment:
    """The environment that templates are written for: that of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Answers, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _time_now
    return environment


class _Answers(Extension):
    """`{% generation %} … {% endgeneration %}`, which marks the answers of a conversation; it changes no text."""

    tags = {"generation"}  # noqa: RUF012  jinja's own name

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    """Unlike jinja's own filter, this one leaves characters of HTML as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _time_now(form: str) -> str:
    return datetime.now().strftime(form)

"""Conversations as text, rendered as transformers' `apply_chat_template` renders them."""

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


def read_messages(text: str) -> list[Message]:
    """Read a JSON list of messages with role and content. Any other text is a user's message."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return value
    return [{"role": "user", "content": text}]


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("role"), str) and "content" in entry


def render_chat(
    template: str, messages: Sequence[Message], tokens: Mapping[str, str], is_answered: bool
) -> str:
    """Render a conversation with a chat template.

    Args:
        template: A jinja template, as in tokenizer_config.json. It runs in jinja's sandbox.
        tokens: The texts of special tokens, such as `bos_token`.
        is_answered: Whether the conversation is complete. If not, an answer begins at the end.

    Raises:
        UserError: The template is not valid jinja, or refuses this conversation.
    """
    values = {"messages": list(messages), "tools": None, "documents": None, **tokens}
    try:
        compiled_template = _environment().from_string(template)
        return compiled_template.render(values, add_generation_prompt=not is_answered)
    except Exception as error:  # a template can raise any exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"the chat template does not render this conversation ({reason}): "
            "change its messages, or leave out --chat"
        ) from error


def _environment() -> Environment:
    """The jinja environment of transformers, for which chat templates are written."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_current_time
    return environment


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks the answers and changes no text."""

    tags = {"generation"}  # noqa: RUF012  jinja's name

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    """Convert to JSON without escaping the special characters of HTML, unlike jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_current_time(form: str) -> str:
    return datetime.now().strftime(form)

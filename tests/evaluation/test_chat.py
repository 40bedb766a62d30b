"""Chat templates are rendered as by transformers, in a sandbox."""

import json

import pytest

from anlit.errors import UserError
from anlit.evaluation.chat import read_messages, render_chat

CONVERSATION = [
    {"role": "system", "content": "the cat"},
    {"role": "user", "content": "naïve café 🦜"},
    {"role": "assistant", "content": "the dogs sat"},
    {"role": "user", "content": "and the mat"},
]
TEMPLATES = {
    "special tokens and filters": (
        "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: "
        "{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    ),
    "generation tag and white space": (
        "{%- for m in messages %}\n    {%- if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}<{{ m.content }}>{% endif %}\n{%- endfor %}\n"
        "  {% if add_generation_prompt %}\n!{% endif %}"
    ),
    "loop control and tojson": (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
        "{{ m | tojson }}{% endfor %}"
    ),
    "namespace": (
        "{% set s = namespace(n=0) %}{% for m in messages %}"
        "{% set s.n = s.n + m.content | length %}{% endfor %}{{ s.n }}"
    ),
    "tools, documents and time": (
        "{% if tools is none and not documents %}{{ messages[0]['content'] }}{% endif %}"
        "{{ strftime_now('%Y') }}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("is_answered", [True, False])
def test_templates_are_rendered_as_by_transformers(name: str, is_answered: bool) -> None:
    library = pytest.importorskip("transformers.utils.chat_template_utils")
    template = TEMPLATES[name]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = library.render_jinja_template(
        [CONVERSATION], chat_template=template, add_generation_prompt=not is_answered, **tokens
    )

    text = render_chat(template, CONVERSATION, tokens, is_answered)

    assert text
    assert text == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content.format.__globals__['a'] }}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
        "{{ messages[7].role }}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_refused(template: str) -> None:
    with pytest.raises(UserError, match="the chat template does not render this conversation"):
        render_chat(template, CONVERSATION, {}, is_answered=False)


def test_a_list_of_messages_is_a_conversation() -> None:
    assert read_messages(json.dumps(CONVERSATION)) == CONVERSATION


@pytest.mark.parametrize("text", ["hello", "[1, 2]", "[]", '{"role": "user"}'])
def test_any_other_text_is_a_message_of_the_user(text: str) -> None:
    assert read_messages(text) == [{"role": "user", "content": text}]

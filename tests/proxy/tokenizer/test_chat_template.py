from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError

from ppd.proxy.tokenizer.chat_template import ChatTemplate

SAID = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[go]{% endif %}"
USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, "}


@pytest.mark.parametrize(
    ("text", "is_parts"),
    [
        (SAID, False),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for part in m['content'] | list %}{{ part }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages[1:] %}{% for part in m['content'] %}{{ part }}{% endfor %}{% endfor %}", True),
        (
            "{% set rest = messages %}{% for m in rest %}{% for part in m.content %}{{ part }}{% endfor %}{% endfor %}",
            True,
        ),
        (
            "{% macro shown(said) %}{% for part in said %}{{ part }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ shown(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro shown(content) %}{% for part in content %}{{ part }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ shown('x') }}{% endfor %}",
            False,
        ),
        (
            "{% for m in messages %}{% set content = m.content %}{% for part in content %}{{ part }}{% endfor %}"
            "{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{% endfor %}", False),
    ],
)
def test_a_template_shows_whether_content_is_parts(text: str, is_parts: bool) -> None:
    assert ChatTemplate(text, {}).content_is_parts(tools=False) is is_parts


@pytest.mark.parametrize(
    ("text", "given", "rendered"),
    [
        (SAID, {"add_generation_prompt": True}, "[user:hi][assistant:well, ][go]"),
        (SAID, {"continue_final_message": True}, "[user:hi][assistant:well, "),
        (SAID.replace("m.content", "m.content | trim"), {"continue_final_message": True}, "[user:hi][assistant:well,"),
        ("{{ bos_token }}{{ eos_token }}|{{ deep }}", {"deep": 1}, "<s>|1"),
        ("{{ tools is none }}{{ documents is none }}", {}, "TrueTrue"),
        ("{{ {'a': '<&>ä'} | tojson }}", {}, '{"a": "<&>ä"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", {}, "[\n 1,\n 2\n]"),
        ("{% generation %}said{% endgeneration %}!", {}, "said!"),
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}", {}, "user"),
        ("{{ strftime_now('%%') }}", {}, "%"),
        ("{% if True %}\n  x\n{% endif %}\ny", {}, "  x\ny"),
    ],
)
def test_it_renders_as_hugging_faces_library_does(text: str, given: dict[str, Any], rendered: str) -> None:
    assert ChatTemplate(text, {"bos_token": "<s>"}).render([USER, REPLY], **given) == rendered


def test_requests_with_tools_may_have_a_template_of_their_own() -> None:
    template = ChatTemplate("plain", {}, "{{ tools[0].name }}")
    assert [template.render([USER], tools) for tools in (None, [{"name": "look"}])] == ["plain", "look"]


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("{{ raise_exception('no') }}", {}),
        ("{{ ''.__class__.__mro__ }}", {}),  # the sandbox refuses it
        ("{% set _ = messages.append(1) %}", {}),
        ("nothing of it", {"continue_final_message": True}),
    ],
)
def test_what_allows_no_prompt_is_an_error(text: str, given: dict[str, Any]) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(text, {}).render([USER, REPLY], **given)


def test_what_is_no_template_is_an_error() -> None:
    with pytest.raises(TemplateError):
        ChatTemplate("{% for %}", {})

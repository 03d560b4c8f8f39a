"""A chat template, rendered as Hugging Face's library does it, which vLLM calls. Source: `transformers` 4.51 to 5.

Needs jinja2, of the extra `tokenizer`. Templates come with models, so they run in a sandbox; but one may loop for ever.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None


class Rendering(TemplateError):
    """The template, or what it is given, allows no prompt."""


class ChatTemplate:
    """names: of special tokens, as `bos_token`, with their texts."""

    def __init__(self, text: str, names: Mapping[str, str], with_tools: str | None = None) -> None:
        """with_tools: the template for requests with tools, if that is another one. TemplateError if one is none."""
        self._names = names
        self._template = _Compiled(text)
        self._with_tools = self._template if with_tools is None else _Compiled(with_tools)

    def content_is_parts(self, *, tools: bool) -> bool:
        """Whether it goes through the parts of a message's content; else content is one text."""
        return self._of(tools=tools).content_is_parts

    def knows_developer(self, *, tools: bool) -> bool:
        text = self._of(tools=tools).text
        return '"developer"' in text or "'developer'" in text

    def render(self, messages: Sequence[Message], tools: Tools = None, **given: Any) -> str:
        """given: `add_generation_prompt`, `continue_final_message`, and what else the template reads.

        Any exception that a template's code may raise.
        """
        chat = list(messages)
        continued = given.pop("continue_final_message", None)
        said = ""
        if continued:
            chat[-1], said = _marked(chat[-1])
        template = self._of(tools=tools is not None).template
        text: str = template.render(messages=chat, tools=tools, **{"documents": None, **self._names, **given})
        return _cut(text, said) if continued else text

    def _of(self, *, tools: bool) -> _Compiled:
        return self._with_tools if tools else self._template


class _Compiled:
    def __init__(self, text: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _today
        self.text = text
        self.template = environment.from_string(text)
        self.content_is_parts = any(_loops_over_content(environment.parse(text)))


class _Generation(Extension):
    """`{% generation %}` marks what an assistant says, for training."""

    tags = {"generation"}  # noqa: RUF012  # as its base has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _marked(message: Message) -> tuple[Message, str]:
    """The last message with a mark at its end, and the text that it then continues."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUED}, content
    parts = [dict(part) for part in content or ()]
    for part in reversed(parts):
        if "text" in part:
            said = part["text"]
            part["text"] = said + _CONTINUED
            return {**message, "content": parts}, said
    raise Rendering("the last message has no text to continue")


def _cut(text: str, said: str) -> str:
    """Up to the mark. A template may strip a message's end, and with it the mark's own space."""
    at = text.rfind(_CONTINUED.strip())
    if at < 0 or said.strip() not in text:
        raise Rendering("the template leaves out the message that is to be continued")
    return text[:at] if text[at : at + len(_CONTINUED)] == _CONTINUED else text[:at].rstrip()


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    """Jinja's own escapes what HTML does not allow."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _refuse(message: str) -> str:
    raise Rendering(message)


def _today(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


# -- whether content is parts: as vLLM finds out, see its `renderers/hf.py`


def _loops_over_content(root: nodes.Template) -> Iterator[nodes.For]:
    """Loops over the content of a message, or over a name `content`, or over what a macro gets of it."""
    messages = set(_aliases(root, "messages"))
    loops = list(root.find_all(nodes.For))
    said = {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name) and _is_any(loop.iter, messages)}
    in_macros = set[int]()
    for macro in root.find_all(nodes.Macro):
        given = set(_content_parameters(root, macro, said))
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in given:
                yield loop
    for loop in loops:
        is_named = id(loop) not in in_macros and isinstance(loop.iter, nodes.Name) and loop.iter.name == "content"
        if is_named or _is_any(loop.iter, said, "content"):
            yield loop


def _aliases(root: nodes.Template, name: str) -> Iterator[str]:
    yield name
    known, waiting = {name}, deque([name])
    while waiting:
        source = waiting.popleft()
        for one in root.find_all(nodes.Assign):
            if isinstance(one.target, nodes.Name) and _is_any(one.node, {source}) and one.target.name not in known:
                known.add(one.target.name)
                waiting.append(one.target.name)
                yield one.target.name


def _content_parameters(root: nodes.Template, macro: nodes.Macro, said: set[str]) -> Iterator[str]:
    names = [argument.name for argument in macro.args]
    for call in root.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        yield from (name for name, value in zip(names, call.args, strict=False) if _is_any(value, said, "content"))
        for keyword in call.kwargs:
            if isinstance(keyword, nodes.Keyword) and keyword.key in names and _is_any(keyword.value, said, "content"):
                yield keyword.key


def _is_any(node: nodes.Node | None, names: set[str], key: str | None = None) -> bool:
    """Whether it is one of these variables, or this member of one, perhaps filtered or in part."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_any(node.node, names, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_any(node.node, names, key)
    if key is not None:
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == key and _is_any(node.node, names)
        return isinstance(node, nodes.Getattr) and node.attr == key and _is_any(node.node, names)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names

"""Chat templates: a conversation in OpenAI's form to the text that its model reads.

They differ in what comes first and in what they leave out, which is all that caches see of them:

- `qwen` (Qwen3): system, then tools in the same turn; reasoning is kept only after the last user's message.
- `glm` (GLM-4.6): tools, then system; reasoning is kept only after the last user's message.
- `llama` (Llama 3.1): system, then tools inside of the first user's message; no reasoning at all.
- a tokenizer's own, where its folder has one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Message = Mapping[str, Any]
Messages = Sequence[Message]
Template = Callable[[Messages, Sequence[Any], bool], str]
"""Takes messages, tools, and whether the assistant's turn is opened at the end."""


def qwen(messages: Messages, tools: Sequence[Any], opens: bool) -> str:
    system, rest = _head(messages)
    if tools:
        system += f"\n\n# Tools\n\n<tools>\n{_lines(tools)}\n</tools>\n\nReturn each call as a JSON object."
    text = [f"<|im_start|>system\n{system}<|im_end|>\n"] if system else []
    last_query = _last_query(rest)
    for at, message in enumerate(rest):
        role = "user" if message["role"] == "tool" else message["role"]
        content = _text(message)
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if (reasoning := message.get("reasoning_content")) and at > last_query:
            content = f"<think>\n{reasoning}\n</think>\n\n{content}"
        for call in message.get("tool_calls") or ():
            content += ("\n" if content else "") + f"<tool_call>\n{_call(call)}\n</tool_call>"
        text.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
    return "".join(text) + ("<|im_start|>assistant\n" if opens else "")


def glm(messages: Messages, tools: Sequence[Any], opens: bool) -> str:
    system, rest = _head(messages)
    text = ["[gMASK]<sop>"]
    if tools:
        text.append(f"<|system|>\n# Tools\n\n<tools>\n{_lines(tools)}\n</tools>\n\nReturn each call as XML.")
    if system:
        text.append(f"<|system|>\n{system}")
    last_query = _last_query(rest)
    for at, message in enumerate(rest):
        content = _text(message)
        if message["role"] == "assistant":
            reasoning = (message.get("reasoning_content") or "") if at > last_query else ""
            content = f"\n<think>{reasoning}</think>\n{content}"
            for call in message.get("tool_calls") or ():
                content += f"\n<tool_call>{_call(call)}\n</tool_call>"
            text.append(f"<|assistant|>{content}")
        elif message["role"] == "tool":
            text.append(f"<|observation|>\n<tool_response>\n{content}\n</tool_response>")
        else:
            text.append(f"<|{message['role']}|>\n{content}")
    return "".join(text) + ("<|assistant|>" if opens else "")


def llama(messages: Messages, tools: Sequence[Any], opens: bool) -> str:
    system, rest = _head(messages)
    text = ["<|begin_of_text|>", _llama_turn("system", f"Cutting Knowledge Date: December 2023\n\n{system}")]
    tools_of_first = f"Given the following functions, answer with a call.\n\n{_lines(tools)}\n\n" if tools else ""
    for message in rest:
        role, content = message["role"], _text(message)
        if role == "user":
            content, tools_of_first = tools_of_first + content, ""
        for call in message.get("tool_calls") or ():
            content += _call(call)
        text.append(_llama_turn("ipython" if role == "tool" else role, content))
    return "".join(text) + ("<|start_header_id|>assistant<|end_header_id|>\n\n" if opens else "")


TEMPLATES: Mapping[str, Template] = {"qwen": qwen, "glm": glm, "llama": llama}


def from_folder(folder: Path) -> Template:
    """The chat template of a tokenizer's folder."""
    try:
        from jinja2 import BaseLoader
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as exc:
        raise SystemExit("a chat template needs the package `jinja2`: pip install 'ppd-router[offline]'") from exc
    config = json.loads((folder / "tokenizer_config.json").read_text())
    environment = ImmutableSandboxedEnvironment(loader=BaseLoader(), trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps  # as transformers does it: the usual filter escapes HTML
    template = environment.from_string(config["chat_template"])

    def render(messages: Messages, tools: Sequence[Any], opens: bool) -> str:
        plain = [{**message, "content": _text(message)} for message in messages]
        return template.render(messages=plain, tools=list(tools) or None, add_generation_prompt=opens)

    return render


def written(template: Template, messages: Messages, tools: Sequence[Any], reply: Message) -> str:
    """What the model writes for this reply: the end of the conversation's text that the reply makes."""
    prompt = template(messages, tools, True)
    whole = template([*messages, reply], tools, False)
    if not whole.startswith(prompt):
        raise ValueError("the template writes a reply differently from how it opens one")
    return whole[len(prompt) :].rstrip("\n")


def _head(messages: Messages) -> tuple[str, Messages]:
    """The text of the leading system message, and the messages after it."""
    return (_text(messages[0]), messages[1:]) if messages and messages[0]["role"] == "system" else ("", messages)


def _last_query(messages: Messages) -> int:
    return max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)


def _lines(tools: Sequence[Any]) -> str:
    return "\n".join(json.dumps(tool) for tool in tools)


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'


def _llama_turn(role: str, content: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"

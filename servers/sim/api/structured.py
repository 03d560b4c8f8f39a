"""What a request asks of its answer's form, in the words of each API."""

from __future__ import annotations

from typing import Any

from ..core.errors import BadRequest
from ..core.structured_text import AnswerForm, Tool
from .requests import JsonBody

_MUST_CALL = ("required", "any")
_NO_ARGUMENTS = {"type": "object", "properties": {}}


def chat_form(body: JsonBody) -> AnswerForm | None:
    tools = [tool["function"] for tool in _functions(body) if isinstance(tool.get("function"), dict)]
    answers_tool = _role(body.raw("messages")) in ("tool", "function")
    return _form(body, _tools(tools, "parameters"), response_schema(body), answers_tool=answers_tool)


def responses_form(body: JsonBody) -> AnswerForm | None:
    items = body.raw("input")
    last = items[-1] if isinstance(items, list) and items else None
    answers_tool = isinstance(last, dict) and last.get("type") == "function_call_output"
    form = (body.mapping("text") or {}).get("format")
    schema = _schema(form, form, "text.format")
    return _form(body, _tools(_functions(body), "parameters"), schema, answers_tool=answers_tool)


def messages_form(body: JsonBody) -> AnswerForm | None:
    messages = body.raw("messages")
    content = messages[-1].get("content") if _role(messages) == "user" else None
    parts = content if isinstance(content, list) else []
    answers_tool = any(isinstance(part, dict) and part.get("type") == "tool_result" for part in parts)
    tools = [tool for tool in _objects(body) if isinstance(tool.get("input_schema"), dict)]
    return _form(body, _tools(tools, "input_schema"), None, answers_tool=answers_tool)


def completions_form(body: JsonBody) -> AnswerForm | None:
    schema = response_schema(body)
    return None if schema is None else AnswerForm(schema=schema)


def response_schema(body: JsonBody) -> Any:
    """None: any text."""
    form = body.mapping("response_format")
    return _schema(form, (form or {}).get("json_schema"), "response_format")


def _schema(form: Any, holder: Any, param: str) -> Any:
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise BadRequest(f"{param} must be of type text, json_object or json_schema.", param)
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise BadRequest(f"{param} of type json_schema needs a schema.", param)
    return schema


def _form(body: JsonBody, tools: tuple[Tool, ...], schema: Any, *, answers_tool: bool) -> AnswerForm | None:
    """After a tool's result an answer is text unless the choice says otherwise."""
    choice, named = _tool_choice(body.raw("tool_choice"))
    if named is not None:
        tools = tuple(tool for tool in tools if tool.name == named)
    if (named is not None or choice in _MUST_CALL) and not tools:
        which = "tools must be set" if named is None else f"the tool `{named}` must be among `tools`"
        raise BadRequest(f"When using `tool_choice`, {which}.", "tool_choice")
    must_call = named is not None or choice in _MUST_CALL
    if choice == "none" or (answers_tool and not must_call):
        tools = ()
    if not tools and schema is None:
        return None
    return AnswerForm(tools=tools, must_call=must_call, is_named=named is not None, schema=schema)


def _tool_choice(given: Any) -> tuple[str, str | None]:
    """The kind of choice, and the name of the tool that was chosen."""
    if given is None:
        return "auto", None
    kind, name = given, None
    if isinstance(given, dict):
        function = given.get("function")
        kind, name = given.get("type"), (function if isinstance(function, dict) else given).get("name")
    if kind in ("function", "tool") and isinstance(name, str):
        return "named", name
    if kind in ("none", "auto", *_MUST_CALL):
        return str(kind), None
    raise BadRequest("tool_choice must be none, auto, required, or the name of a tool.", "tool_choice")


def _functions(body: JsonBody) -> list[dict[str, Any]]:
    return [tool for tool in _objects(body) if tool.get("type") == "function"]


def _objects(body: JsonBody) -> list[dict[str, Any]]:
    tools = body.raw("tools")
    return [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []


def _tools(functions: list[dict[str, Any]], parameters: str) -> tuple[Tool, ...]:
    """Functions without a name cannot be called."""
    return tuple(
        Tool(tool["name"], _parameters(tool.get(parameters))) for tool in functions if isinstance(tool.get("name"), str)
    )


def _parameters(given: Any) -> dict[str, Any]:
    return given | {"type": "object"} if isinstance(given, dict) and given else _NO_ARGUMENTS


def _role(messages: Any) -> Any:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return last.get("role") if isinstance(last, dict) else None

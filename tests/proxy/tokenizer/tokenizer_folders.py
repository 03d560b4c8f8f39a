"""Small tokenizers on disk, as a model's folder has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ppd.servers.sim.core.tokens import TURN_END, TURN_START

SIM_TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson(separators=(',', ':'), sort_keys=true) }}
{%- if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- if not (loop.last and continue_final_message) %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The simulated engine's plain template."""

LOOPING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
REFUSING = "{{ raise_exception('no') }}"


def characters(
    *,
    specials: dict[str, int] | None = None,
    begins: str = "",
    piece: str = "",
    normalizer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`tokenizer.json` of one token a character, whose id is its code point, as the simulated engine's.

    begins: a special token that `add_special_tokens` puts first. piece: a text that is one token.
    """
    named = {"<|im_start|>": TURN_START, "<|im_end|>": TURN_END} if specials is None else specials
    vocabulary = {chr(code): code for code in range(0x250)} | named | ({piece: 1000} if piece else {})
    added = [
        {"id": id, "content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        | {"single_word": False}
        for text, id in named.items()
    ]
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": begins, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begins: {"id": begins, "ids": [named.get(begins, 0)], "tokens": [begins]}},
    }
    pattern = f"{piece}|[\\s\\S]" if piece else "[\\s\\S]"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        "post_processor": template if begins else None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }


def write_tokenizer(
    folder: Path, template: str | None = SIM_TEMPLATE, tokenizer: dict[str, Any] | None = None, **config: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer or characters()))
    told = config if template is None else {"chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder

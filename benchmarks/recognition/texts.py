"""Made-up text of the kinds that prompts hold: prose, JSON, code, Chinese. A seed says which."""

from __future__ import annotations

import json
from random import Random

_WORDS = (
    "tide lamp river stone letter orchard signal winter copper harbour glass engine paper north garden the a of and in "
    "to with over between because slowly early small measured answer question before every nothing remains together "
    "window carries against several yesterday quiet distance method returns failure connection temperature important"
).split()
_NAMES = "count index path user_id total buffer offset status items width retries deadline parent value name".split()
_CHARACTERS = (
    "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后"
    "小么心多天而能好都然没日于起还发成事只作当想看文无开手十用主行方又如前所本见经头面公同三已老从动两长"
)


def prose(random: Random, tokens: int) -> str:
    """About so many tokens; every sentence ends in a full stop."""
    words = random.choices(_WORDS, k=max(1, tokens - tokens // 10))
    for at in range(8, len(words), 9):
        words[at] += "."
    return " ".join(words).capitalize()


def listing(random: Random, tokens: int) -> str:
    """JSON, as tools answer."""
    rows, size = [], 0
    while size < tokens * 3:
        rows.append({name: random.randint(0, 99_999) for name in random.sample(_NAMES, 4)})
        size += 60
    return json.dumps({"results": rows})


def code(random: Random, tokens: int) -> str:
    lines, size = list[str](), 0
    while size < tokens * 3:
        one, other, function = random.sample(_NAMES, 3)
        lines.append(f"def {function}({one}, {other}):\n    if {one} >= {other}[{random.randint(0, 99)}]:")
        lines.append(f"        return self._{other}.get({one!r}, {random.randint(0, 9999)})\n")
        size += 110
    return "\n".join(lines)


def chinese(random: Random, tokens: int) -> str:
    return "".join(random.choices(_CHARACTERS, k=round(tokens * 1.5)))


def mixed(random: Random, tokens: int) -> str:
    return random.choice((prose, prose, listing, code, chinese))(random, tokens)


def call_id(random: Random) -> str:
    return f"call_{random.getrandbits(64):016x}"

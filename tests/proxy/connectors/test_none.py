from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ppd.proxy.connectors.leg import Handoff, Pair, plain_leg
from ppd.proxy.connectors.none import NoConnector
from ppd.proxy.openai.request import Endpoint, Fields

TEXT = {"model": "m", "prompt": "Once upon", "max_tokens": 40}


def test_p_computes_and_d_gets_the_plain_body(
    fields_of: Callable[[dict[str, Any]], Fields], make_pair: Callable[..., Pair]
) -> None:
    connector, pair = NoConnector(), make_pair(connector="none")
    fields = fields_of({**TEXT, "kv_transfer_params": {"x": 1}})
    prefill = connector.prefill_leg(Endpoint.COMPLETIONS, fields, pair, "p")
    assert msgspec.json.decode(prefill.body) == {**TEXT, "max_tokens": 1, "ignore_eos": True}
    assert prefill.headers == {"X-Request-Id": "p"}
    handoff = connector.handoff(b'{"usage": {"prompt_tokens": 9}}', pair)
    assert handoff == Handoff({}, 9, None)
    decode = connector.decode_leg(Endpoint.COMPLETIONS, fields, pair, "d", handoff)
    assert decode == plain_leg(Endpoint.COMPLETIONS, fields, "d")
    assert msgspec.json.decode(decode.body) == TEXT

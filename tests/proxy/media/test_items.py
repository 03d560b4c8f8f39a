"""Items of requests: which parts they are, what they are named, and what is refused."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from ppd.proxy.errors import RequestError
from ppd.proxy.media.items import MediaItem, MediaKind, chat_part, metadata_part, named, part_of, replaced

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR" + (640).to_bytes(4) + (480).to_bytes(4) + b"\x08\x06"
DATA = base64.b64encode(PNG).decode()
DATA_URL = f"data:image/png;base64,{DATA}"
SITE = "https://site.example/a.png"
SOUND = base64.b64encode(b"sound").decode()


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def picture(url: str = DATA_URL, **members: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **members}


def video(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def read(prompt: Any, tenant: str = "acme", limit: int = 9) -> tuple[Any, list[MediaItem]]:
    raw, items = named(msgspec.Raw(msgspec.json.encode(prompt)), "messages", tenant, limit)
    return msgspec.json.decode(raw), items


def name_of(part: Any, tenant: str = "acme") -> str:
    _, (item,) = read(user(part), tenant)
    return item.name


IMAGE, AUDIO, VIDEO = MediaKind.IMAGE, MediaKind.AUDIO, MediaKind.VIDEO
PARTS: dict[str, tuple[dict[str, Any], MediaKind]] = {
    "chat's image": (picture(), IMAGE),
    "an image by URL": (picture(SITE), IMAGE),
    "a short image": ({"type": "image_url", "image_url": SITE}, IMAGE),
    "an image without a type": ({"image_url": SITE}, IMAGE),
    "an image with a file's id beside its URL": (picture(SITE, file_id="f"), IMAGE),
    "a sound": ({"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}, AUDIO),
    "a sound by URL": ({"type": "audio_url", "audio_url": {"url": "http://site.example/a.wav"}}, AUDIO),
    "a video": (video(SITE), VIDEO),
    "a video's frames": (video(f"data:video/jpeg;base64,{DATA},{DATA}"), VIDEO),
    "an image of Responses": ({"type": "input_image", "image_url": DATA_URL}, IMAGE),
    "an image of Messages": (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
        IMAGE,
    ),
    "an image of Messages by URL": ({"type": "image", "source": {"type": "url", "url": SITE}}, IMAGE),
}


@pytest.mark.parametrize("case", PARTS)
def test_each_form_of_a_part_is_an_item_whose_name_replaces_the_clients(case: str) -> None:
    part, kind = PARTS[case]
    text = {"type": "text", "text": "what is this?"}
    prompt, (item,) = read([{"role": "system", "content": "hi"}, *user(text, {**part, "uuid": "a client's"})])
    assert prompt == [{"role": "system", "content": "hi"}, *user(text, {**part, "uuid": item.name})]
    assert (item.kind, item.unit, len(item.name)) == (kind, 1, 32)
    raw = msgspec.Raw(msgspec.json.encode(prompt))
    assert msgspec.json.decode(part_of(raw, item)) == {**part, "uuid": item.name}


def test_what_holds_no_media_stays_byte_for_byte() -> None:
    plain = b'{"role": "user",  "content": [ "a", {"type":"text", "text":"b"} ]}'
    with_media = msgspec.json.encode(*user(picture()))
    raw, items = named(msgspec.Raw(b"[%b,%b]" % (plain, with_media)), "messages", "acme")
    assert len(items) == 1
    assert plain in bytes(raw)


def test_parts_within_results_of_tools_are_items_too() -> None:
    held = {"type": "tool_result", "tool_use_id": "t", "content": [picture()]}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": SITE}]}
    prompt, items = read([*user({"type": "text", "text": "a"}, held), output])
    assert [(item.unit, item.kind) for item in items] == [(0, IMAGE), (1, IMAGE)]
    assert prompt[0]["content"][1]["content"][0]["uuid"] == items[0].name
    assert prompt[1]["output"][0]["uuid"] == items[1].name


def test_an_item_that_is_a_part_itself_is_named_and_a_message_never_is_one() -> None:
    prompt, items = read([{"type": "input_image", "image_url": SITE, "uuid": "a client's"}])
    assert prompt[0]["uuid"] == items[0].name
    disguised = {**user({**picture(), "uuid": "a client's"})[0], "image_url": SITE}
    prompt, items = read([disguised])
    assert prompt[0]["content"][0]["uuid"] == items[0].name


@pytest.mark.parametrize(
    ("part", "sent"),
    [
        ({"type": "text", "text": "a"}, {"type": "text", "text": "a"}),
        ({"type": "image_pil", "image_pil": None}, {"type": "image_pil", "image_pil": None}),
        ({"type": "text", "text": "a", "image_pil": None}, {"type": "text", "text": "a", "image_pil": None}),
        ({"type": "tool_use", "id": "t", "input": {}}, {"type": "tool_use", "id": "t", "input": {}}),
    ],
)
def test_no_part_keeps_a_clients_name(part: Any, sent: Any) -> None:
    """By a name alone vLLM finds what another client had it encode."""
    prompt, items = read(user({**part, "uuid": "another tenant's"}))
    assert (prompt, items) == (user(sent), [])


@pytest.mark.parametrize(
    "disguise",
    [
        {"type": "text", "text": "a"},
        {"type": None},
        {"type": 7},
        {},
        {"type": "thinking", "thinking": ""},
        {"type": "tool_use", "id": "t", "input": {}},
        {"type": "image_url", "video_url": {"url": SITE}, "image_embeds": {}, "image_pil": None},
        {"type": "input_image", "input_audio": {"data": "AAAA"}, "audio_embeds": {}},
    ],
)
def test_what_vllm_takes_for_an_image_is_named_by_that_image_alone(disguise: Any) -> None:
    """Where a part has a `uuid` vLLM goes by the members that hold media, not by its `type`."""
    prompt, (item,) = read(user({**disguise, "image_url": {"url": SITE}, "uuid": "another tenant's"}))
    (part,) = prompt[0]["content"]
    assert (part["uuid"], item.kind) == (name_of(picture(SITE)), IMAGE)
    assert part.keys() & {"image_pil", "image_embeds", "audio_embeds", "video_url", "input_audio"} == set()


def test_a_message_that_calls_itself_a_part_is_a_message() -> None:
    held = {**user({**picture(), "uuid": "another tenant's"})[0], "type": "input_image", "image_url": SITE, "uuid": "x"}
    prompt, (item,) = read([held])
    assert prompt[0]["content"][0]["uuid"] == item.name == name_of(picture())


def test_a_name_is_of_tenant_kind_and_content_however_they_are_written() -> None:
    name = name_of(picture())
    messages = PARTS["an image of Messages"][0]
    broken = f"{DATA[:8]}\n{DATA[8:]}"
    for same in (picture(detail="low"), messages, PARTS["an image of Responses"][0], picture(f"DATA:;BASE64,{broken}")):
        assert name_of(same) == name
    others = [
        name_of(picture(), "another"),
        name_of(picture("data:image/png;base64,AAAA")),
        name_of(video(DATA_URL)),
        name_of(picture(SITE)),
        name_of(picture(SITE + "?")),
    ]
    assert len({name, *others}) == 6


def test_frames_have_the_name_of_these_frames_alone() -> None:
    """vLLM takes a video as pictures with commas between, where its type says so."""
    urls = ("video/jpeg;base64,QUJD,RA==", "video/jpeg;base64,QUI=,Q0Q=", "video/jpeg;base64,QUJDRA==")
    names = [name_of(video(f"data:{url}")) for url in (*urls, "video/mp4;base64,QUJDRA==")]
    assert len({*names}) == 4
    assert name_of(video("data:VIDEO/JPEG;codecs=x;base64,QUJD,RA==")) == names[0]


def test_what_is_known_of_its_size() -> None:
    _, (data, url, sound) = read(user(picture(), picture(SITE), PARTS["a sound"][0]))
    assert (data.size_bytes, data.pixels) == (len(PNG), 640 * 480)
    assert (url.size_bytes, url.pixels, sound.size_bytes, sound.pixels) == (0, 0, 5, 0)


def test_what_is_encoded_already_or_kept_by_the_engine_is_no_item_but_loses_the_clients_name() -> None:
    embeds = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 3]}, "uuid": "mine"}
    file = {"type": "input_image", "file_id": "f1", "uuid": "mine"}
    prompt, items = read(user(embeds, file))
    first, second = prompt[0]["content"]
    assert items == [] and first["uuid"] != "mine" and "uuid" not in second
    assert first["uuid"] != read(user({**embeds, "image_embeds": {}}))[0][0]["content"][0]["uuid"]


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (picture("data:image/png,abc"), "base64"),
        (picture("data:image/png;base64"), "base64"),
        (picture("data:image/png;base64,a!b="), "base64"),
        (picture("data:image/png;base64,abc"), "base64"),
        (picture("data:image/png;base64,é==="), "base64"),
        (picture("file:///etc/passwd"), "http, https or data"),
        (picture("/etc/passwd"), "http, https or data"),
        (picture("httpx://a"), "http, https or data"),
        (picture(f"data:image/png;base64,{DATA},{DATA}"), "base64"),
        (video(f"data:video/mp4;base64,{DATA},{DATA}"), "base64"),
        (video(f"data:video/jpeg;base64,{DATA},abc"), "base64"),
        (picture(""), "a URL or data"),
        ({"type": "image_url", "image_url": None, "uuid": "another tenant's"}, "a URL or data"),
        ({"type": "image_url", "uuid": "another tenant's"}, "a URL or data"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "a URL or data"),
        ({"type": "input_audio", "input_audio": {"data": "%"}}, "base64"),
        ({"type": "image", "source": {"type": "base64", "data": 7}}, "a URL or data"),
        ({"type": "image", "source": {}}, "a URL or data"),
        ({"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}, "http, https or data"),
        ({"type": "input_image", "image_url": "file:///etc/passwd"}, "http, https or data"),
        ({"type": "input_image", "image_url": "data:image/png;base64,abc"}, "base64"),
        ({"type": "input_image", "image_url": ""}, "a URL or data"),
    ],
)
def test_a_part_that_no_engine_can_read_is_refused_without_its_content(part: Any, told: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(user(part))
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert told in caught.value.message and "passwd" not in caught.value.message and "abc" not in caught.value.message


def test_more_items_than_the_limit_are_refused() -> None:
    assert len(read(user(picture(), picture()), limit=2)[1]) == 2
    with pytest.raises(RequestError, match="media_limit"):
        read([*user(picture(), picture()), *user(picture(SITE))], limit=2)
    with pytest.raises(RequestError, match="media_limit"):
        read(user(picture(), {"type": "image_embeds", "image_embeds": "AA=="}), limit=1)


@pytest.mark.parametrize(
    "case", [case for case, (part, _) in PARTS.items() if "Responses" in case or "Messages" in case]
)
def test_an_encoder_gets_every_part_as_chat_has_it(case: str) -> None:
    part, _ = PARTS[case]
    prompt, (item,) = read(user(part))
    raw = msgspec.Raw(msgspec.json.encode(prompt))
    url = SITE if "by URL" in case else DATA_URL
    assert msgspec.json.decode(chat_part(part_of(raw, item), item.name)) == picture(url, uuid=item.name)


def test_chats_own_parts_go_to_an_encoder_as_they_are() -> None:
    part = msgspec.json.encode(picture(SITE, uuid="n"))
    assert chat_part(msgspec.Raw(part), "n") == part


def test_metadata_take_the_place_of_some_items() -> None:
    prompt, items = read(
        [*user(picture(), {"type": "text", "text": "x"}, picture(SITE)), {"role": "user", "content": "y"}]
    )
    raw = msgspec.Raw(msgspec.json.encode(prompt))
    part = metadata_part(IMAGE, msgspec.Raw(b'{"grid":[1,2]}'), items[1].name)
    prompt[0]["content"][2] = {"type": "image_embeds", "image_embeds": {"grid": [1, 2]}, "uuid": items[1].name}
    assert msgspec.json.decode(replaced(raw, [(items[1], part)])) == prompt
    assert replaced(raw, []) == raw


def test_items_without_a_unit_of_their_own_do_not_count() -> None:
    """As reasoning in Responses: no KV is told apart by it."""
    part = {"type": "input_image", "image_url": "https://a.example/b.png"}
    said = [{"type": "reasoning", "summary": []}, {"role": "user", "content": [part]}, part]
    prompt = msgspec.Raw(msgspec.json.encode(said))
    assert [each.unit for each in named(prompt, "input", "t")[1]] == [1, 2]
    assert [each.unit for each in named(prompt, "input", "t", no_units=("reasoning",))[1]] == [0, 1]

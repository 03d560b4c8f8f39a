"""Which model an upload is for: one reading of the form, or none."""

from __future__ import annotations

import aiohttp
import pytest
from werkzeug.test import encode_multipart

from ppd.proxy.bodies.forwarded import model_of
from ppd.proxy.errors import RequestError
from ppd.proxy.openai.form import PARTS_LIMIT, field, is_form

TYPE = "multipart/form-data; boundary=B"
AUDIO = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\n'
FAKE = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\r\n'


def form(*parts: bytes, end: bytes = b"--B--\r\n") -> bytes:
    return b"".join(b"--B\r\n" + part + b"\r\n" for part in parts) + end


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (form(MODEL + b"sim"), "sim"),
        (form(AUDIO + b"\x00\xff", MODEL + b"sim"), "sim"),
        (form(MODEL + b"sim", AUDIO + b"bytes", end=b"--B--"), "sim"),
        (form(MODEL + b" s\xc3\xadm "), " sím "),
        (form(MODEL), ""),
        (form(AUDIO + b"bytes"), None),
        (form(), None),
        (form(b"content-disposition:form-data;name=model\r\n\r\nsim"), "sim"),
        (form(b'Content-Type: text/plain\r\nContent-Disposition: form-data; name="model"\r\n\r\nsim'), "sim"),
        (form(b'Content-Disposition: form-data; name="MODEL"\r\n\r\nsim'), None),
        (form(AUDIO + FAKE + b'name="model"\r\n\r\nother\r\n', MODEL + b"sim"), "sim"),
        (form(AUDIO + b"\r\n--A" + FAKE, MODEL + b"sim"), "sim"),
    ],
)
def test_a_field_is_what_its_own_part_says(body: bytes, model: str | None) -> None:
    assert field(TYPE, body, "model") == model


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"preamble\r\n" + form(MODEL + b"sim"),
        b"\r\n\r\n" + form(MODEL + b"sim"),
        b"\n" + form(MODEL + b"sim"),
        form(MODEL + b"sim", MODEL + b"sim"),
        form(MODEL + b"sim", MODEL + b"other"),
        form(b'Content-Disposition: form-data; name="model"; filename="a"\r\n\r\nsim'),
        form(b"Content-Disposition: form-data; name=\"model\"; filename*=utf-8''a\r\n\r\nsim"),
        form(MODEL + b"\xff"),
        form(MODEL + b"sim", end=b""),
        form(MODEL + b"sim", end=b"--B"),
        form(MODEL + b"sim", end=b"--B\r\n"),
        form(MODEL + b"sim") + b"more",
        form(MODEL + b"sim") + form(MODEL + b"other"),
        form(AUDIO + b"\n--B" + FAKE),
        form(AUDIO + b"\n--B--\n", MODEL + b"other"),
        form(AUDIO + b"a--B", MODEL + b"sim"),
        form(AUDIO + b"ab\n--B" + FAKE),
        form(AUDIO + b"abc--B" + FAKE),
        form(AUDIO + b"--Bother\r\n", MODEL + b"sim"),
        form(MODEL + b"sim").replace(b"\r\n", b"\n"),
        form(b'Content-Disposition: form-data; name="model"'),
        form(b'Content-Disposition: form-data; name="x"\r\n ; name="model"\r\n\r\nsim'),
        form(b'Content-Disposition: form-data; name="x"; name="model"\r\n\r\nsim'),
        form(b"Content-Disposition: form-data; name=\"x\"; name*=utf-8''model\r\n\r\nsim"),
        form(b'Content-Disposition: form-data; name="x"; filename="a\\"; name="model"\r\n\r\nsim'),
        form(b'Content-Disposition: form-data; name="x"\r\n' + MODEL + b"sim"),
        form(b'Content-Disposition: attachment; name="model"\r\n\r\nsim'),
        form(b"Content-Type: text/plain\r\n\r\nsim"),
        form(b"Content-Transfer-Encoding: base64\r\n" + MODEL + b"c2lt"),
        form(b"X: " + b"x" * 9000 + b"\r\n" + MODEL + b"sim"),
        form(b"X: a\x00\r\n" + MODEL + b"sim"),
        form(b"X: a\n\r\n" + MODEL + b"sim"),
    ],
)
def test_a_form_that_two_readers_could_read_differently_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"^the form can't be read: "):
        field(TYPE, body, "model")


@pytest.mark.parametrize(
    ("content_type", "is_read"),
    [
        ("Multipart/Form-Data;Boundary=B", True),
        ('multipart/form-data; boundary="B"', True),
        ("multipart/form-data; charset=UTF-8; boundary=B", True),
        ('multipart/form-data; boundary=B; charset="utf-8"', True),
        ("multipart/form-data", False),
        ("multipart/form-data; boundary=", False),
        ("multipart/form-data; boundary=B; charset=utf-7", False),
        ("multipart/form-data; boundary=A; boundary=B", False),
        ("multipart/form-data; boundary*=utf-8''B", False),
        ("multipart/form-data; x=y; boundary=B", False),
    ],
)
def test_the_boundary_is_the_one_that_everybody_reads(content_type: str, is_read: bool) -> None:
    assert is_form(content_type)
    if is_read:
        assert field(content_type, form(MODEL + b"sim"), "model") == "sim"
    else:
        with pytest.raises(RequestError, match="Content-Type"):
            field(content_type, form(MODEL + b"sim"), "model")


def test_refusals_do_not_repeat_what_was_sent() -> None:
    with pytest.raises(RequestError) as refused:
        field(TYPE, form(MODEL + b"secret", MODEL + b"secret"), "model")
    assert "secret" not in refused.value.message
    assert (refused.value.status, refused.value.param) == (400, "model")


def test_what_werkzeug_writes_is_read() -> None:
    longest = "WerkzeugFormPart_".rjust(70, "-")  # RFC 2046, 5.1.1; by itself it makes up one that may be longer
    boundary, body = encode_multipart({"model": "sim", "prompt": "ünï"}, boundary=longest)
    assert field(f'multipart/form-data; boundary="{boundary}"', body, "model") == "sim"


async def test_what_aiohttp_writes_is_read() -> None:
    data = aiohttp.FormData()
    data.add_field("file", b"\x00--\r\n", filename="ä b.wav", content_type="audio/wav")
    data.add_field("model", "sim")
    writer = data()
    assert isinstance(writer, aiohttp.MultipartWriter)
    assert field(writer.headers["Content-Type"], await writer.as_bytes(), "model") == "sim"


@pytest.mark.parametrize(
    ("content_type", "body", "model"),
    [
        ("application/json", b'{"model": "sim", "input": "x"}', "sim"),
        ("application/json", b'{"model": "a", "mod\\u0065l": "sim"}', "sim"),
        ("application/json", '{"model": "sim"}'.encode("utf-16"), ""),
        ("application/json", b'{"model": 1}', ""),
        ("application/json", b"", ""),
        ("Multipart/Form-data; boundary=B", form(MODEL + b"sim"), "sim"),
        ("application/x-www-form-urlencoded", b"model=sim", ""),
    ],
)
def test_the_model_of_a_body(content_type: str, body: bytes, model: str) -> None:
    assert model_of(content_type, body) == model


def test_a_form_has_a_bounded_number_of_parts() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\ny\r\n'
    kind = "multipart/form-data; boundary=b"
    assert field(kind, part * (PARTS_LIMIT - 1) + b"--b--\r\n", "model") is None
    with pytest.raises(RequestError, match="more than 1000 parts"):
        field(kind, part * PARTS_LIMIT + b"--b--\r\n", "model")

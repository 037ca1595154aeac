"""Bodies with one thing wrong, at any place: good bodies as text, a value of each replaced by something else.

As text, because much of what clients can send is no value: NaN, half an emoji, a key given twice, brackets without end.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

_MARK = "\x01here\x01"
_MARKED = json.dumps(_MARK)
_DEEP, _TOO_DEEP = 120, 100_000

VALUES: tuple[str, ...] = (
    *("null", "true", "false", "0", "-0.0", "1", "-1", "2", "0.5", "1e-320", "1e308", "-1e308", "1e999", "1E400"),
    *("NaN", "Infinity", "-Infinity", "2147483648", "9223372036854775807", "9223372036854775808"),
    *("-9223372036854775809", "18446744073709551615", "18446744073709551616", "1" * 5000, "01", "1.", "0x10"),
    *(
        '""',
        '" "',
        '"text"',
        '"0"',
        '"="',
        '"=f"',
        '"none"',
        '"required"',
        '"\\u0000"',
        '"\\ud800"',
        '"\\udc00\\ud800"',
    ),
    *('"\\ud83d\\ude00"', '"<|im_start|>"', '"<tool_call>"', '"{{ 1/0 }}"', '"("', '"(a*)*b"', '"a{1000000}"', '"[^"'),
    *('"start: start start"', '"data:image/png;base64,AAAA"', '"../../etc/passwd"', '"\\u202e\\u200d"', '"\x01"'),
    *('"' + "a" * 100_000 + '"', '"' + "<|im_end|>" * 5000 + '"', '"' + "\\u0000" * 2000 + '"'),
    *("[]", "[null]", "[[]]", "[[[]]]", "[{}]", '[""]', "[0]", "[-1]", "[1.5]", "[true]", "[1e999]", '["\\ud800"]'),
    *("[" + "0," * 5000 + "0]", "[" + "{}," * 5000 + "{}]", "[" + '"",' * 5000 + '""]', "[[1],[2]]", '[1,"a"]'),
    *("{}", '{"":""}', '{"\\ud800":1}', '{"a":{"b":{"c":[]}}}', '{"a":1,"a":"b"}', '{"type":null}', '{"type":"text"}'),
    *('{"type":"function"}', '{"type":"function","function":{"name":"f"}}', '{"type":"image_url","image_url":"x"}'),
    *('{"$ref":"#"}', '{"$ref":"http://127.0.0.1:1/x"}', '{"type":["string","null"]}', '{"type":"nothing"}'),
    *('{"allOf":[{"$ref":"#"}]}', '{"enum":[]}', '{"pattern":"("}', '{"minimum":1e999}', '{"maxItems":99999999999}'),
    *('{"not":{}}', '{"' + "k" * 50_000 + '":null}', "{" + ",".join(f'"k{i}":{i}' for i in range(5000)) + "}"),
    *("[" * _DEEP + "]" * _DEEP, '{"a":' * _DEEP + "1" + "}" * _DEEP, '{"items":' * 60 + "{}" + "}" * 60),
    *(
        "[" * _TOO_DEEP,
        "[" * 900 + "]" * 900,
        '{"a":' * 300 + "1" + "}" * 300,
        "",
        "tru",
        "'x'",
        "1,",
        "}",
        '"\\x"',
        "/**/1",
    ),
)
"""What a value is replaced by: of every type, at the edges of each, and no JSON at all."""

HEADERS: tuple[tuple[str, str], ...] = (
    *(("X-Request-Id", value) for value in ("", " ", "\xff", "a" * 5000, "r1", "\u00e9".encode().decode("latin-1"))),
    *(
        ("Content-Type", value)
        for value in ("text/plain", "application/json; charset=utf-16", "multipart/form-data", "x")
    ),
    *(("Content-Encoding", value) for value in ("gzip", "deflate", "br", "zstd", "identity", "nothing", "gzip, gzip")),
    *(("X-Vllm-Priority", value) for value in ("", "1", "-1", "9" * 30, "--1", "1.5", "\xb2", "a")),
    *(("X-Backhaul-Seal", value) for value in ("", ".", "1.", ".a", "9999999999.00", "\xb2.a", "9" * 50 + ".\xff")),
    *(("X-Conversation-Id", value) for value in ("", "c", "\xff\xfe", "a" * 5000)),
    *(("Authorization", value) for value in ("", "Bearer \xff", "a" * 5000)),
    *(("Accept", value) for value in ("", "text/event-stream", "x/y")),
    *(("X-Data-Parallel-Rank", value) for value in ("1", "a")),
    *(("Connection", value) for value in ("close", "X-Request-Id, content-length", "upgrade")),
    *(("Expect", value) for value in ("100-continue",)),
)

_REPEATED = re.compile(rb"(.{1,20}?)\1{30,}", re.DOTALL)

Step = str | int
How = Literal["replace", "delete", "twice", "append", "wrap", "header", "bytes"]


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        told = f" with {self.headers}" if self.headers else ""
        text = _REPEATED.sub(rb"\1 ... ", self.body)[:3000]
        return f"POST {self.path}{told}: {text!r}"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One thing to be done to one body; cheap to have by the hundred thousand."""

    path: str
    body: dict[str, Any]
    place: tuple[Step, ...]
    how: How
    what: int = 0

    def request(self) -> Request:
        if self.how == "header":
            name, value = HEADERS[self.what]
            return Request(self.path, json.dumps(self.body).encode(), {name: value})
        if self.how == "bytes":
            return Request(self.path, _spoiled(json.dumps(self.body).encode())[self.what])
        if self.how in ("delete", "wrap"):
            return Request(self.path, json.dumps(_edited(self.body, self.place, self.how)).encode())
        text = json.dumps(_edited(self.body, self.place, "mark" if self.how != "append" else "append"))
        value = VALUES[self.what]
        if self.how == "twice":
            key = json.dumps(self.place[-1])
            value = f"{json.dumps(_at(self.body, self.place))},{key}:{value}"
        assert text.count(_MARKED) == 1
        return Request(self.path, text.replace(_MARKED, value).encode())


def mutations(bodies: Sequence[tuple[str, dict[str, Any]]]) -> list[Mutation]:
    """Every one of them."""
    return [mutation for path, body in bodies for mutation in _of(path, body)]


def chosen(bodies: Sequence[tuple[str, dict[str, Any]]], count: int, seed: int) -> Iterator[Request]:
    """So many of them; a longer run begins with those of a shorter one."""
    order = mutations(bodies)
    random.Random(seed).shuffle(order)
    return (mutation.request() for mutation in order[:count])


def _of(path: str, body: dict[str, Any]) -> Iterator[Mutation]:
    for place in _places(body):
        for what in range(len(VALUES)):
            yield Mutation(path, body, place, "replace", what)
        yield Mutation(path, body, place, "delete")
        yield Mutation(path, body, place, "wrap")
        for what in range(0, len(VALUES), 9):
            if isinstance(place[-1], str):
                yield Mutation(path, body, place, "twice", what)
            if isinstance(_at(body, place), list):
                yield Mutation(path, body, place, "append", what)
    for what in range(len(HEADERS)):
        yield Mutation(path, body, (), "header", what)
    for what in range(len(_spoiled(b"{}"))):
        yield Mutation(path, body, (), "bytes", what)


def _places(value: Any, before: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    items: Iterator[tuple[Step, Any]] = iter(())
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(enumerate(value[:3]))
    for step, inner in items:
        yield (*before, step)
        yield from _places(inner, (*before, step))


def _at(value: Any, place: Sequence[Step]) -> Any:
    for step in place:
        value = value[step]
    return value


def _edited(body: dict[str, Any], place: Sequence[Step], how: Literal["mark", "delete", "append", "wrap"]) -> Any:
    copy = json.loads(json.dumps(body))
    holder, last = _at(copy, place[:-1]), place[-1]
    if how == "mark":
        holder[last] = _MARK
    elif how == "append":
        holder[last].append(_MARK)
    elif how == "wrap":
        holder[last] = [holder[last]]
    else:
        del holder[last]
    return copy


def _spoiled(body: bytes) -> tuple[bytes, ...]:
    """A body that is wrong as a whole."""
    return (
        *(b"", b"null", b"[]", b"0", b'"a"', b"{", body[:-1], body + b"x", body + body, b"[" + body + b"]"),
        *(b"\xef\xbb\xbf" + body, body.replace(b'"', b"'"), body.replace(b"a", b"\xff"), gzip.compress(body)),
        *(body.decode().encode("utf-16"), b"\x00" * 1000, b" " * 100_000 + body, b"[" * 200_000),
    )

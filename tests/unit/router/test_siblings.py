"""What passes between the processes of a router."""

from __future__ import annotations

import pytest

from router.siblings import MAX_FRAME_BYTES, Frame, Frames, Siblings

FRAMES = [
    Frame("listens"),
    Frame("ask", 7, "drain", "decode http://d", [b'["decode"]']),
    Frame("replies", 7, bodies=[b"", b"\n\n", b"x" * 10_000]),
]


@pytest.mark.parametrize("size", [1, 3, 1000, 1 << 20])
def test_frames_are_put_together_whatever_the_pieces(size: int) -> None:
    data = b"".join(frame.pack() for frame in FRAMES)
    frames = Frames()
    found = [frame for start in range(0, len(data), size) for frame in frames.feed(data[start : start + size])]
    assert [frame._replace(bodies=list(frame.bodies)) for frame in found] == [
        frame._replace(bodies=list(frame.bodies)) for frame in FRAMES
    ]


def test_frame_of_no_sensible_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        list(Frames().feed((MAX_FRAME_BYTES + 1).to_bytes(4)))


def test_frames_before_one_that_is_none_are_taken() -> None:
    frames = Frames().feed(Frame("listens").pack() + b"\xff" * 8)
    assert next(frames).op == "listens"
    with pytest.raises(ValueError, match="a frame of"):
        next(frames)


async def test_router_of_one_process_asks_itself() -> None:
    siblings = Siblings()

    async def upper(body: bytes) -> bytes:
        return body.upper()

    siblings.answer("upper", upper)
    assert await siblings.gather("upper", b"abc") == [b"ABC"]
    assert siblings.all_listen

"""Whatever happens to pods, watches and versions, in the end the list is the truth."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.discovery.kube import Cluster
from router.discovery.parse import parse
from tests.kube_stub import PODS, KubeStub, pod
from tests.unit.router.discovery.listening import following

NAMES = ("a", "b", "c", "d", "e")

states = st.fixed_dictionaries(
    {
        "ip": st.sampled_from([None, *(f"10.0.0.{number}" for number in range(1, 9))]),
        "ready": st.sampled_from([True, True, True, False, None]),
        "phase": st.sampled_from(["Running", "Running", "Running", "Pending", "Failed"]),
        "deleting": st.sampled_from([False, False, True]),
        "labels": st.sampled_from([{"app": "engine"}, {"app": "engine"}, {"app": "other"}]),
        "uid": st.sampled_from(["1", "2"]),
    }
)
steps = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(NAMES), states),
    st.tuples(st.just("delete"), st.sampled_from(NAMES)),
    st.tuples(st.just("drop")),
    st.tuples(st.just("end_watches")),
    st.tuples(st.just("compact"), st.sampled_from(["status", "event"])),
    st.tuples(st.just("silence")),
    st.tuples(st.just("bookmark")),
    st.tuples(st.just("wait for a watch")),
    st.tuples(st.just("let things happen")),
)


def truth(pods: dict[str, dict[str, Any]]) -> dict[str, set[tuple[str, bool]]]:
    """By address: the uids of engines there, and whether they are leaving."""
    found: dict[str, set[tuple[str, bool]]] = {}
    for name, one in pods.items():
        in_rotation = one["ready"] is True or one["deleting"]
        if one["labels"] == {"app": "engine"} and one["phase"] == "Running" and one["ip"] and in_rotation:
            found.setdefault(f"http://{one['ip']}:8000", set()).add((name + one["uid"], one["deleting"]))
    return {url: {one for one in ones if not one[1]} or ones for url, ones in found.items()}


async def run(history: Sequence[tuple[Any, ...]], directory: Path) -> None:
    async with KubeStub(directory).running() as stub:
        stub.largest_page = 2
        cluster = Cluster(directory=directory, server=stub.url, allow_http=True, longest_pause=0.002)
        async with following(parse("pods://serving?labels=app=engine&port=http", cluster)) as heard:
            pods: dict[str, dict[str, Any]] = {}
            for step in history:
                match step:
                    case ("put", name, state):
                        pods[name] = state
                        stub.put(PODS, pod(name, **state | {"uid": name + state["uid"]}))
                    case ("delete", name):
                        if pods.pop(name, None):
                            stub.delete(PODS, name)
                    case ("wait for a watch",):
                        await stub.watched()
                    case ("let things happen",):
                        for _ in range(20):
                            await asyncio.sleep(0)
                    case (what, *details):
                        getattr(stub, what)(*details)
            stub.drop()  # those that were made to be silent
            expected = truth(pods)

            def is_true() -> bool:
                told = {one.url: (one.incarnation, one.leaving) for one in heard.lists[-1]}
                return told.keys() == expected.keys() and all(told[url] in ones for url, ones in expected.items())

            await heard.until_it_is(is_true)
            await stub.watched()
            assert is_true(), "the watch has nothing that the list had not"


@given(history=st.lists(steps, max_size=40))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_history_ends_in_the_truth(history: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
        runner.run(run(history, Path(directory)))

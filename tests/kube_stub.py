"""A Kubernetes API server with pods and endpoint slices to list and watch, and hooks for what goes wrong with them.

It keeps every version of every object, so that a watch may begin at any that was not compacted.
"""

from __future__ import annotations

import asyncio
import copy
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson
from aiohttp import web

Object = dict[str, Any]
PODS, SLICES = "pods", "endpointslices"


def pod(
    name: str,
    ip: str | None,
    *,
    namespace: str = "serving",
    uid: str = "",
    labels: Mapping[str, str] | None = None,
    ready: bool | None = True,
    phase: str = "Running",
    deleting: bool = False,
    containers: Sequence[Object] = (),
    init_containers: Sequence[Object] = (),
) -> Object:
    """`ready`: the condition; None for a pod that has none yet."""
    metadata: Object = {"name": name, "namespace": namespace, "labels": dict(labels or {"app": "engine"})}
    if uid:
        metadata["uid"] = uid
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    status: Object = {"phase": phase, "containerStatuses": [{"name": "engine", "ready": True}]}
    if ip is not None:
        status["podIP"] = ip
    if ready is not None:
        status["conditions"] = [
            {"type": "Initialized", "status": "True"},
            {"type": "Ready", "status": str(ready)},
        ]
    engine = {"name": "engine", "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}]}
    spec: Object = {"containers": list(containers) or [engine], "initContainers": list(init_containers)}
    return {"metadata": metadata, "spec": spec, "status": status}


def endpoint(ip: str, *, uid: str = "", **conditions: bool | None) -> Object:
    """`conditions`: ready, serving, terminating; those not given are not said."""
    target = {"targetRef": {"kind": "Pod", "uid": uid}} if uid else {}
    return {"addresses": [ip], "conditions": conditions, **target}


def endpoint_slice(
    name: str,
    endpoints: Sequence[Object],
    *,
    service: str = "engines",
    namespace: str = "serving",
    ports: Mapping[str, int] | None = None,
) -> Object:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv6" if any(":" in one["addresses"][0] for one in endpoints) else "IPv4",
        "endpoints": list(endpoints),
        "ports": [{"name": key, "port": port} for key, port in (ports or {"http": 8000}).items()],
    }


@dataclass
class _Happened:
    version: int
    kind: str
    namespace: str
    before: Object | None
    after: Object | None

    def seen_by(self, wants: Callable[[Object], bool]) -> Object | None:
        """As the event of a watch with a selector: what no longer matches is deleted, as far as that watch knows."""
        was = self.before is not None and wants(self.before)
        if self.after is not None and wants(self.after):
            return {"type": "MODIFIED" if was else "ADDED", "object": self.after}
        last = self.after or self.before
        return {"type": "DELETED", "object": last} if was else None


@dataclass(eq=False)
class _Watch:
    kind: str
    namespace: str
    wants: Callable[[Object], bool]
    bookmarks: bool
    events: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    """None ends it."""
    transport: asyncio.Transport | None = None
    is_silent: bool = False

    def send(self, event: Object) -> None:
        if not self.is_silent:
            self.events.put_nowait(orjson.dumps(event) + b"\n")


class KubeStub:
    def __init__(self, directory: Path, *, tls: ssl.SSLContext | None = None) -> None:
        """`directory`: where the files of the service account are written."""
        self._directory = directory
        self._tls = tls
        self.url = ""
        self.token = "first-token"
        self.version = 100
        self.asked: list[str] = []
        """What was asked, as "list pods", "watch pods" or "401"."""
        self.queries: list[dict[str, str]] = []
        self.refuse: dict[str, int] = {}
        """What is answered with an error of that status: "list", "watch"."""
        self.largest_page = 1 << 30
        self.compact_at_next_page = False
        """Once: before a page that is not the first."""
        self.compact_before_watch: Literal["status", "event"] | None = None
        """Once: between a list and its watch."""
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._history: list[_Happened] = []
        self._oldest = 0
        self._compacted_as: Literal["status", "event"] = "status"
        self._pages: dict[str, tuple[int, list[Object]]] = {}
        self._watches: set[_Watch] = set()
        self._answers = asyncio.Event()
        self._answers.set()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[KubeStub]:
        self.write_token()
        (self._directory / "namespace").write_text("serving")
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/{kind:pods}", self._get)
        app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/{namespace}/{kind:endpointslices}", self._get)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=self._tls)
            await site.start()
            self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            self._answers.set()
            self.drop()
            await runner.cleanup()

    # What happens in the cluster

    def put(self, kind: str, one: Object) -> Object:
        """Create it, or replace the one of that name."""
        one = copy.deepcopy(one)
        metadata = one["metadata"]
        key = (kind, metadata["namespace"], metadata["name"])
        before = self._objects.get(key)
        metadata.setdefault("uid", before["metadata"]["uid"] if before else f"uid-{self.version}")
        self.version += 1
        metadata["resourceVersion"] = str(self.version)
        self._objects[key] = one
        self._happened(_Happened(self.version, kind, metadata["namespace"], before, one))
        return one

    def delete(self, kind: str, name: str, namespace: str = "serving") -> None:
        before = self._objects.pop((kind, namespace, name))
        self.version += 1
        self._happened(_Happened(self.version, kind, namespace, before, None))

    def _happened(self, what: _Happened) -> None:
        self._history.append(what)
        for watch in self._watches:
            self._pass_on(watch, what)

    def _pass_on(self, watch: _Watch, what: _Happened) -> None:
        if (watch.kind, watch.namespace) == (what.kind, what.namespace) and (event := what.seen_by(watch.wants)):
            watch.send(event)

    # What goes wrong with the server

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    async def watched(self, num_watches: int = 1, *, since: int = 0) -> None:
        """Until there are so many watches, and more than `since` have begun."""
        async with asyncio.timeout(5), self._changed:
            await self._changed.wait_for(
                lambda: len(self._watches) == num_watches and self.asked.count("watching") > since
            )

    async def has_been_asked(self, what: str, times: int = 1) -> None:
        async with asyncio.timeout(5), self._changed:
            await self._changed.wait_for(lambda: self.asked.count(what) >= times)

    def drop(self) -> None:
        """Cut all watches in the middle of a chunk."""
        for watch in self._watches:
            if watch.transport is not None:
                watch.transport.abort()

    def end_watches(self) -> None:
        """In good order, as after their time."""
        for watch in self._watches:
            watch.events.put_nowait(None)

    def compact(self, answer: Literal["status", "event"] = "status") -> None:
        """Forget what happened, and the rest of lists; `answer`: how a watch from before is told."""
        self._oldest = self.version
        self._compacted_as = answer
        self._history.clear()
        self._pages.clear()
        if answer == "event":
            for watch in self._watches:
                watch.send({"type": "ERROR", "object": _status(410, "too old resource version")})

    def bookmark(self) -> None:
        for watch in self._watches:
            if watch.bookmarks:
                metadata = {"resourceVersion": str(self.version), "creationTimestamp": None}
                watch.send({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": metadata}})

    def send(self, raw: bytes) -> None:
        """Such bytes, in all watches."""
        for watch in self._watches:
            watch.events.put_nowait(raw)

    def hang(self) -> None:
        """Keep all connections, and say nothing on any: those watches never again, new requests until `resume`."""
        self._answers.clear()
        self.silence()

    def silence(self) -> None:
        """Say nothing more in the watches of now."""
        for watch in self._watches:
            watch.is_silent = True

    def speak(self) -> None:
        """Go on in all watches, without what happened meanwhile."""
        for watch in self._watches:
            watch.is_silent = False

    def resume(self) -> None:
        self._answers.set()

    def rotate(self, token: str) -> None:
        """Take this token only; the file is still the old one."""
        self.token = token
        self.drop()

    def write_token(self) -> None:
        (self._directory / "token").write_text(self.token + "\n")

    # Requests

    async def _get(self, request: web.Request) -> web.StreamResponse:
        verb = "watch" if request.query.get("watch") == "1" else "list"
        kind, namespace = request.match_info["kind"], request.match_info["namespace"]
        allowed = request.headers.get("Authorization") == f"Bearer {self.token}"
        self.queries.append(dict(request.query))
        await self._note(f"{verb} {kind}" if allowed else "401")
        await self._answers.wait()
        if not allowed:
            return _refusal(401, "Unauthorized")
        if status := self.refuse.get(verb):
            return _refusal(status, f"{kind} is forbidden: cannot {verb}" if status == 403 else "no good")
        wants = selector(request.query.get("labelSelector", ""))
        if verb == "list":
            return self._list(request, kind, namespace, wants)
        return await self._watch(request, _Watch(kind, namespace, wants, "allowWatchBookmarks" in request.query))

    async def _note(self, what: str) -> None:
        async with self._changed:
            self.asked.append(what)
            self._changed.notify_all()

    def _list(
        self, request: web.Request, kind: str, namespace: str, wants: Callable[[Object], bool]
    ) -> web.StreamResponse:
        if token := request.query.get("continue"):
            if self.compact_at_next_page:
                self.compact_at_next_page = False
                self.compact()
            if token not in self._pages:
                return _refusal(410, "the provided continue parameter is too old")
            version, rest = self._pages[token]
        else:
            version = self.version
            rest = [one for (k, n, _), one in sorted(self._objects.items()) if (k, n) == (kind, namespace)]
            rest = [one for one in rest if wants(one)]
        size = min(int(request.query.get("limit", 1 << 30)), self.largest_page)
        page, rest = rest[:size], rest[size:]
        metadata: Object = {"resourceVersion": str(version)}
        if rest:
            metadata["continue"] = f"page-{len(self.asked)}"
            self._pages[metadata["continue"]] = version, rest
        return web.json_response({"metadata": metadata, "items": page or None})

    async def _watch(self, request: web.Request, watch: _Watch) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if self.compact_before_watch:
            self.version += 1
            self.compact(self.compact_before_watch)
            self.compact_before_watch = None
        if since < self._oldest and self._compacted_as == "status":
            return _refusal(410, "too old resource version")
        if since < self._oldest:
            watch.send({"type": "ERROR", "object": _status(410, "too old resource version")})
            watch.events.put_nowait(None)
        for what in self._history:
            if what.version > since:
                self._pass_on(watch, what)
        watch.transport = request.transport
        self._watches.add(watch)
        seconds = float(request.query["timeoutSeconds"])
        timer = asyncio.get_running_loop().call_later(seconds, lambda: watch.is_silent or watch.events.put_nowait(None))
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            await self._note("watching")
            while (event := await watch.events.get()) is not None:
                await response.write(event)
        except ConnectionError:
            return response
        finally:
            timer.cancel()
            self._watches.discard(watch)
            await self._note("unwatched")
        return response


def selector(text: str) -> Callable[[Object], bool]:
    """Of labels that must be equal, or must not."""
    pairs = [part.partition("!=") if "!=" in part else part.partition("=") for part in text.split(",") if part]

    def wants(one: Object) -> bool:
        labels = one["metadata"].get("labels", {})
        return all((labels.get(key) == value) == (sign == "=") for key, sign, value in pairs)

    return wants


def _status(code: int, message: str) -> Object:
    return {"kind": "Status", "status": "Failure", "message": message, "code": code}


def _refusal(code: int, message: str) -> web.Response:
    return web.json_response(_status(code, message), status=code)

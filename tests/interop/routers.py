"""`backhaul router` as a process, set up as the guide says for vLLM engines."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.interop.engines import BLOCK_SIZE

START_SECONDS = 60.0


@dataclass
class RouterProcess:
    prefill: str
    decode: str
    redis: str
    folder: Path
    url: str = ""

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Until it is ready, and then until the caller is done."""
        self.folder.mkdir()
        facts, settings = self.folder / "router.json", self.folder / "router.yaml"
        settings.write_text(json.dumps(self._settings()))  # JSON is YAML
        command = [sys.executable, "-m", "backhaul", "router", "--config", str(settings), "--json-file", str(facts)]
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while not facts.exists():
                assert process.poll() is None, f"the router ended: see {self.folder}/log"
                time.sleep(0.1)
            self.url = json.loads(facts.read_text())["url"]
            self.wait()
            yield self
        finally:
            process.kill()
            process.wait(10)

    def _settings(self) -> dict[str, Any]:
        return {
            "port": 0,
            "prefill": [self.prefill],
            "decode": [self.decode],
            "redis": self.redis,
            "engines": {self.prefill: {"bidirectional": True, "block_size": BLOCK_SIZE}},
            "kv_block_size": BLOCK_SIZE,
            "kv_recompute_threshold": 0,
            "log_format": "json",
            # Few cores run all of this: what is slow here is not broken.
            "redis_timeout": 2,
            "tokenize_timeout": 20,
            "probe_timeout": 10,
            "prefill_timeout": 600,
            "first_byte_timeout": 600,
            "idle_timeout": 300,
        }

    def wait(self) -> None:
        """Until it has found its engines."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            assert time.monotonic() < deadline, f"the router is not ready: see {self.folder}/log"
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.HTTPError, OSError):
            return False

"""A service as a process, with its log and HTTP paths, for tests of that process alone."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final, Self

WAIT_S: Final = 60.0


class Service:
    """A process of `python -m MODULE`, whose log events can be awaited."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        self.http = self.logged("listening")["http"]

    def logged(self, event: str) -> dict[str, Any]:
        """Wait for the next line of an event, and return it; lines before it are dropped."""
        while True:
            line = self._lines.get(timeout=WAIT_S)
            assert line is not None, f"it ended with {self.process.wait()} before {event}"
            if line["event"] == event:
                return line

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and body of a probe or of the metrics."""
        try:
            with urllib.request.urlopen(self.http + path, timeout=10) as answer:  # noqa: S310  # only http
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        lines = self.get("/metrics")[1].splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process by SIGTERM, as Kubernetes does."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=WAIT_S)
        self._reading.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert code == 0

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

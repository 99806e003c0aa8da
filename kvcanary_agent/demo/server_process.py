"""The demo server as a child process with the agent in it, and calls to it."""

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
# After a connection broke: the time for the server's end to show.
_DYING_TIMEOUT_S = 1.0
_LOG_LINES = 15


class ServerError(Exception):
    """The server did not start, has died, or refused a call. If it has ended, its last log lines are in the message."""


class ServerProcess:
    """Runs `server.py` through ``kvcanary_agent run`` while its context lasts, and never leaves the process behind.

    The user's KVCANARY_* settings hold, with two exceptions: the agent is on, and it reports rather than raises. By
    default it compares every byte that a step reads, so that a corrupted one is seen in the very next step.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        server = Path(__file__).with_name("server.py")
        here = Path.cwd()
        self._arguments = [
            "-m",
            "kvcanary_agent",
            "run",
            str(server.relative_to(here) if server.is_relative_to(here) else server),
        ]
        self._unset = [name for name in ("KVCANARY_ENABLED", "KVCANARY_MODE", "KVCANARY_DRILL") if name in environ]
        self._set = {} if environ.get("KVCANARY_CONTENT", "").strip() else {"KVCANARY_CONTENT": "full"}
        if not environ.get("KVCANARY_INCIDENT_DIR", "").strip():
            self._set["KVCANARY_INCIDENT_DIR"] = tempfile.mkdtemp(prefix="kvcanary-demo-")
        kept = {name: value for name, value in environ.items() if name not in self._unset}
        self._environ = kept | self._set
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the context
        self._process: subprocess.Popen[str] | None = None
        self._address: dict[str, Any] = {}

    @property
    def command(self) -> list[str]:
        """The command that starts the server, as words that one would type in this shell, here."""
        names = ("python", os.path.basename(sys.executable))
        python = next((name for name in names if shutil.which(name) == sys.executable), sys.executable)
        unset = [word for name in self._unset for word in ("-u", name)]
        settings = [f"{name}={value}" for name, value in self._set.items()]
        return [*(["env", *unset] if unset else []), *settings, python, *self._arguments]

    @property
    def content(self) -> str:
        """KVCANARY_CONTENT in the server."""
        return self._environ["KVCANARY_CONTENT"].strip()

    @property
    def incident_folder(self) -> Path:
        """KVCANARY_INCIDENT_DIR in the server: the user's, or a new one that stays."""
        return Path(self._environ["KVCANARY_INCIDENT_DIR"].strip())

    @property
    def url(self) -> str:
        return f"http://{self._address['host']}:{self._address['port']}"

    @property
    def pid(self) -> int:
        return int(self._address["pid"])

    def __enter__(self) -> "ServerProcess":
        self._process = subprocess.Popen(
            [sys.executable, *self._arguments],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self._address = self._first_line(self._process)
        except BaseException:
            self._close(self._process)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None, "the context was entered"
        self._close(self._process)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that the server answers. Threads may share the process: every call has a connection of its own.

        Raises ServerError if there is no answer, or another status than 200.
        """
        connection = HTTPConnection(self._address["host"], self._address["port"], timeout=CALL_TIMEOUT_S)
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = json.load(response)
        except (OSError, HTTPException, ValueError) as error:
            raise ServerError(self._reason(error)) from error
        finally:
            connection.close()
        if response.status != 200:
            raise ServerError(f"{method} {path} was answered {response.status}: {answer['error']}")
        return answer

    def _first_line(self, process: "subprocess.Popen[str]") -> Any:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(START_TIMEOUT_S):
                raise ServerError(f"the server (pid {process.pid}) was not ready after {START_TIMEOUT_S:.0f} s")
        try:
            return json.loads(process.stdout.readline())
        except ValueError:
            _end(process)
            raise ServerError(f"the server did not start: {self._ending(process)}") from None

    def _reason(self, error: Exception) -> str:
        assert self._process is not None, "there is an address"
        try:
            self._process.wait(_DYING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"the server (pid {self.pid}) does not answer: {type(error).__name__}: {error}"
        return f"the server died: {self._ending(self._process)}"

    def _ending(self, process: "subprocess.Popen[str]") -> str:
        status = process.returncode
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        self._log.seek(0)
        log = self._log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join([f"pid {process.pid}, {how}", *(f"  | {line}" for line in log)])

    def _close(self, process: "subprocess.Popen[str]") -> None:
        _end(process)
        assert process.stdout is not None
        process.stdout.close()
        self._log.close()


def _end(process: "subprocess.Popen[str]") -> None:
    try:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # Also when a second Ctrl-C breaks the wait.
        if process.poll() is None:
            process.kill()
            process.wait()

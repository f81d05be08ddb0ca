"""A process that applies chat templates for a server.

Templates come with imported models: they are programs of others, and the limit on their memory holds for a whole
process. In the process of the server it would hold for all requests.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from typing import Any

from regard.errors import UserError
from regard.text import chat

GRACE_SECONDS = 2.0  # beyond the time limit of a template, after which the process is killed


class TemplateProcess:
    """Applies chat templates, one at a time, in a process that is started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def apply(self, template: str, messages: chat.Messages, names: dict[str, Any]) -> str:
        """Do what `regard.text.chat.apply` does, in the process."""
        with self._lock:
            answer = self._ask(json.dumps([template, messages, names]))
        if "error" in answer:
            raise UserError(answer["error"])
        return str(answer["text"])

    def _ask(self, question: str) -> dict[str, str]:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(chat.MAX_SECONDS + GRACE_SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(question + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self._stop()
            return {"error": "the chat template failed: it ended the process that applies it"}
        answer: dict[str, str] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        # -P: modules in the working directory are not imported; in a session of its own, Ctrl-C does not reach it
        command = [sys.executable, "-P", "-m", "regard.server.chat_process"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, encoding="ascii", bufsize=1, start_new_session=True
        )

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()


def main() -> None:
    """Apply the templates on the lines of standard input, until it is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends it to all processes; the server still has requests
    for line in sys.stdin:
        try:
            answer = {"text": chat.apply(*json.loads(line))}
        except UserError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

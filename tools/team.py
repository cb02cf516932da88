"""Child processes that answer requests, and a parent that notices whatever happens to any of them.

A child builds its worker, says *ready* and answers one request after the other; a worker may say more in between. An
exception in a child is raised in the parent with its traceback; a child's death ends any wait, so does the watchdog.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing, contextmanager, suppress
from multiprocessing import connection

STEP_TIMEOUT_S = 300.0  # the watchdog: no single step takes this long on any machine that can hold the model


class DemoFailed(Exception):
    """What went wrong, for the reader of one line; raised in a child it arrives without a traceback."""


class Team:
    """The child processes. Waiting for one of them watches them all: an exception or a death anywhere ends the wait."""

    def __init__(self, workers: dict[str, Callable], settings, environment: Mapping[str, str] | None = None):
        spawn = multiprocessing.get_context("spawn")
        self.pipes, self.processes, self.inbox = {}, {}, {role: deque() for role in workers}
        with changed_environment(environment or {}):
            for role, worker in workers.items():
                self.pipes[role], theirs = spawn.Pipe()
                process = spawn.Process(target=serve, args=(worker, settings, theirs), name=role, daemon=True)
                process.start()
                theirs.close()
                self.processes[role] = process

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        for role, process in self.processes.items():
            if kind is None:
                with suppress(OSError):
                    self.pipes[role].send(None)
            else:
                process.terminate()
        for process in self.processes.values():
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def post(self, role: str, verb: str, *arguments) -> None:
        with suppress(BrokenPipeError):  # its death is noticed, with its last words, by `hear`
            self.pipes[role].send((verb, arguments))

    def ask(self, role: str, verb: str, *arguments):
        self.post(role, verb, *arguments)
        return self.hear(role, "answer")

    def hear_all(self, kind: str) -> None:
        for role in self.pipes:
            self.hear(role, kind)

    def hear(self, role: str, kind: str):
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while not self.inbox[role]:
            self._listen(deadline, why=f"{role}'s {kind}")
        heard, value = self.inbox[role].popleft()
        if heard != kind:
            raise DemoFailed(f"{role} said {heard!r} where {kind!r} was expected")
        return value

    def _listen(self, deadline: float, why: str) -> None:
        role_of = {pipe: role for role, pipe in self.pipes.items()}
        ready = connection.wait(role_of, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise DemoFailed(f"waited {STEP_TIMEOUT_S:.0f} s for {why}")
        for pipe in ready:
            role = role_of[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):  # a closed pipe is a dead child: it closes at no other time
                self.processes[role].join(5)
                raise DemoFailed(f"the {role} process died (exit code {self.processes[role].exitcode})") from None
            if kind == "raised":
                raise DemoFailed(f"the {role} process failed: {value.strip()}")
            self.inbox[role].append((kind, value))


@contextmanager
def changed_environment(changes: Mapping[str, str]):
    """What is started inside inherits it: the loader reads its paths once, before a child's first line runs."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def serve(make_worker: Callable, settings, pipe: connection.Connection) -> None:
    """A child's life: answers requests until the pipe closes; its exceptions go home through the pipe."""
    os.dup2(2, 1)  # stdout belongs to the parent's report
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us

    def tell(kind, value):
        pipe.send((kind, value))

    try:
        with closing(make_worker(settings, tell)) as worker:
            tell("ready", None)
            while (request := pipe.recv()) is not None:
                verb, arguments = request
                tell("answer", getattr(worker, verb)(*arguments))
    except EOFError:
        sys.exit("the parent is gone")
    except DemoFailed as failure:
        tell("raised", str(failure))
    except BaseException:
        tell("raised", traceback.format_exc())

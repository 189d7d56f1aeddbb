"""SIGTERM in a process of a run: it asks the whole run to stop in good order; a second one ends this process.

A rank may sit in C code for long, where no Python handler runs. So the signal's number also goes through a pipe to a
thread, which asks. Loader processes are spared: schedulers of clusters send SIGTERM to every process of a job, and a
loader that died of it would take the last step with it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType

from echelon.control import forks

CODE = 128 + signal.SIGTERM
AGAIN_S = 0.4
"""A second SIGTERM within this time is the guard's, which ends the tree: then the run is not asked for anything."""


class Terminated:
    """From now on, until the process ends. `ask` is called once, in a thread of its own. Make it in the main thread."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.signal(signal.SIGTERM, self._handle)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="echelon-sigterm", daemon=True)
        self._thread.start()
        forks.register(self)
        ready_for_sigterm()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The pipe has it already, unless somebody (an event loop of the script) took the wake-up over: it stays theirs."""
        whose = signal.set_wakeup_fd(-1)
        if whose != self._writer:
            os.write(self._writer, bytes([number]))
        signal.set_wakeup_fd(self._writer if whose == -1 else whose, warn_on_full_buffer=False)

    def _listen(self) -> None:
        times, asked = 0, False
        while True:
            waits = times == 1 and not asked
            ready, _, _ = select.select([self._reader], [], [], AGAIN_S if waits else None)
            if not ready:
                asked = True
                threading.Thread(target=self._ask, name="echelon-ask-stop", daemon=True).start()
                continue
            times += os.read(self._reader, 64).count(signal.SIGTERM)
            if times > 1 and signal.getsignal(signal.SIGTERM) == self._handle:
                os._exit(CODE)

    def after_fork(self) -> None:
        """A child of the script is not the run's process: SIGTERM ends it as it always did."""
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ready_for_sigterm() -> None:
    """The guard starts processes with SIGTERM held back: one that came before there was a handler comes now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def deaf_to_sigterm() -> None:
    """The last act of a process whose end is decided: the interpreter takes handlers away before it is gone, and a
    SIGTERM in that moment would change how the process ended. Whoever hangs after this is killed by the guard."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def spare_this_process() -> None:
    """In a loader's process: only its own parent ends it with SIGTERM; others' are for the run."""
    if threading.current_thread() is not threading.main_thread():
        return
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def listen() -> None:
        while True:
            told = signal.sigwaitinfo({signal.SIGTERM})
            if told.si_pid == parent or os.getppid() != parent:
                os._exit(0)

    threading.Thread(target=listen, name="echelon-spared", daemon=True).start()

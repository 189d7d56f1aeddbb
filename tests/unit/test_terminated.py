"""SIGTERM in a process of a run, beside what a script does with signals itself."""

from __future__ import annotations

import subprocess
import sys


def test_an_event_loop_of_the_script_keeps_its_signals_after_a_sigterm():
    program = """
import asyncio, os, signal, threading
from echelon.control.terminated import Terminated

asked = threading.Event()
Terminated(asked.set)

async def main():
    woken = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, woken.set)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.to_thread(asked.wait, 20)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(woken.wait(), 20)

asyncio.run(main())
print("woken", asked.is_set())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "woken True\n"), done.stderr

"""The main of every process of a run: `python -m echelon.role worker|server|coordinator|forkserver`. It only wires.

A worker is set up so that the script sees what plain python would show it (sys.argv, sys.path, __main__), and tells
the run how the script ended: Left, or Failed with the script's own traceback.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

from echelon import activity, dynamo, env, forkserver
from echelon.clock import Deadline
from echelon.control import member, stacks
from echelon.control.roster import WORKER
from echelon.control.terminated import Terminated, deaf_to_sigterm
from echelon.errors import PREEMPTED, EchelonError, Preempted, UsageError
from echelon.events import Left

JOIN_S = 60.0
LEAVE_S = 2.0


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Never returns: the process ends with the script's code."""
    words = sys.argv[1:] if argv is None else list(argv)
    ours, script = _split(words)
    options = _parser().parse_args(ours)
    if options.role == "forkserver":
        ours, script = _split(forkserver.serve(options.socket_fd, options.imports))
        options = _parser().parse_args(ours)
    else:
        dynamo.postpone()
    env.take_back()
    faulthandler.enable(all_threads=False)
    token = env.take_token()
    where = env.place()
    if token is None or not where.supervised:
        print(
            "echelon.role is started by `echelon run`; to train, run `echelon run train.py`.", file=sys.stderr
        )
        sys.exit(2)
    try:
        if options.role == "coordinator":
            coordinate(where, token, options.listen_fd, options.lifeline_fd)
            sys.exit(0)
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    stacks.install()
    joining = member.Joining(where, token, Deadline.after(JOIN_S))
    member.set_current(joining)
    ending = Ending(joining)
    Terminated(ending.ask_stop)
    atexit.register(
        ending.close
    )  # the first registered runs last: after all that the script leaves for its end
    if options.role == "server":
        serve(ending)
    work(script, ending)


def serve(ending: Ending) -> NoReturn:
    """A parameter server: from its seat to the end of the run."""
    from echelon.failure import exit_code
    from echelon.ps import duty

    try:
        code = duty.serve(ending.mine, ending.joining.place)
        ending.done(code)
    except BaseException as error:
        code = exit_code(error)
        ending.failed(error, code)
    _flush()
    sys.exit(code)


def coordinate(where: env.Place, token: str, listen_fd: int, lifeline_fd: int | None) -> None:
    """Serves the run on the socket that the supervisor opened, until SIGTERM or until the lifeline's other end closes."""
    from echelon.elastic import coordinator

    if where.run_dir is None:
        raise UsageError("a coordinator needs ECHELON_RUN_DIR")
    coordinator.serve(listen_fd, where.run_dir, token, lifeline_fd)


class Ending:
    """How a worker or server takes its leave: events first, then its seat, so that what it said counts."""

    def __init__(self, joining: member.Joining) -> None:
        self.joining, self.code, self.step = joining, 0, 0

    @property
    def mine(self) -> member.Member:
        """Blocks while this process is still joining; raises what kept it from that."""
        return self.joining.result()

    def ask_stop(self) -> None:
        """This process got SIGTERM: the run is to stop."""
        where = self.joining.place
        with contextlib.suppress(EchelonError):
            reason = f"SIGTERM to {where.role} {where.rank} on {where.host} (pid {os.getpid()})"
            self.mine.call("stop", Deadline.after(LEAVE_S), reason=reason)

    def failed(self, error: BaseException, code: int) -> None:
        """Tells at once: the others must not wait for this one."""
        from echelon import failure

        where = self.joining.place
        self.code = code
        try:
            mine = self.mine
        except Exception as apart:  # never joined: there is nobody to tell but the log
            told = failure.describe(
                error, rank=where.rank, host=where.host, step=0, role=where.role, run=where.run
            )
            plain = isinstance(apart, EchelonError) and apart is error
            _complain(f"echelon: {apart}" if plain else told.traceback)
            return
        told = failure.describe(
            error, rank=where.rank, host=where.host, step=_step(mine), role=where.role, run=where.run
        )
        mine.emit(told)
        if not isinstance(error, SystemExit):
            _complain(told.traceback)
        elif not isinstance(error.code, int):
            _complain(str(error.code))
        self.step = told.step
        self._leave()

    def done(self, code: int) -> None:
        """The script came to its end, or was stopped in good order; threads and atexit handlers of its own may still speak."""
        self.code = code
        if self.mine.at_end is not None and code == 0:
            self.mine.at_end()
        self.step = _step(self.mine)
        if self.mine.report is not None:
            self.mine.emit(self.mine.report())

    def close(self) -> None:
        try:
            self._close()
        finally:
            deaf_to_sigterm()

    def _close(self) -> None:
        try:
            mine = self.mine
        except Exception:
            return
        if self.code in (0, PREEMPTED):
            if mine.place.role == WORKER:
                mine.emit(Left(rank=mine.place.rank, step=self.step))
            self._leave()
        mine.close()

    def _leave(self) -> None:
        """Gives up this rank's seat; if that fails, the supervisor notices the end anyway."""
        deadline = Deadline.after(LEAVE_S)
        self.mine.flush(deadline)
        with contextlib.suppress(EchelonError):
            code = (
                0 if self.code == PREEMPTED else self.code
            )  # those who left in good order left nobody waiting
            self.mine.call("leave", deadline, step=self.step, code=code)


def work(script: Sequence[str], ending: Ending) -> NoReturn:
    """Runs the script to its end and says how it ended. atexit handlers run after that, as in plain python."""
    from echelon.failure import exit_code

    if ending.joining.place.incarnation:
        activity.coming.__enter__()
    code = 0
    try:
        try:
            run_script(list(script))
        except SystemExit as leaving:
            code = exit_code(leaving)
            if code != 0 and not isinstance(leaving, Preempted):
                raise
        activity.inside(activity.ENDED).__enter__()  # for good: threads and atexit handlers may still run
        ending.done(code)
    except BaseException as error:  # the script's, or our own at its end
        code = exit_code(error)
        _flush()
        ending.failed(error, code)
        sys.exit(code)
    _flush()
    sys.exit(code)


def run_script(script: list[str]) -> None:
    """The script as `python script args` or `python -m module args` would run it."""
    main_module = types.ModuleType("__main__")
    main_module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main_module
    if script[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *script[2:]]
        runpy._run_module_as_main(script[1])  # type: ignore[attr-defined]
        return
    path = script[0]
    sys.argv = script
    if os.path.isdir(path) or not _is_source(path):
        runpy.run_path(path, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    path = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main_module).update(
        __file__=path, __loader__=loader, __spec__=None, __package__=None, __cached__=None
    )
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main_module))


def _is_source(path: str) -> bool:
    with open(path, "rb") as file:
        start = file.read(4)
    return not start.startswith(b"PK\x03\x04") and start != importlib.util.MAGIC_NUMBER


def _step(mine: member.Member) -> int:
    try:
        return mine.report().step if mine.report is not None else 0
    except Exception:
        return 0


def _complain(text: str) -> None:
    """Onto stderr, whatever characters it lacks."""
    try:
        print(text, file=sys.stderr, flush=True)
    except UnicodeError:
        print(text.encode("ascii", "backslashreplace").decode(), file=sys.stderr, flush=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m echelon.role", description=__doc__.splitlines()[0])
    roles = parser.add_subparsers(dest="role", required=True)
    for name in ("worker", "server", "coordinator"):
        role = roles.add_parser(name)
        role.add_argument("--rank", type=int, required=True)
        role.add_argument("--run", required=True)
    roles.choices["coordinator"].add_argument("--listen-fd", type=int, required=True)
    roles.choices["coordinator"].add_argument("--lifeline-fd", type=int)
    fork_server = roles.add_parser("forkserver")
    fork_server.add_argument("--socket-fd", type=int, required=True)
    fork_server.add_argument("--imports", nargs="*", default=[])
    fork_server.add_argument("--room", help="makes room for the command lines of the roles")
    return parser


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and after the first `--` the script's command line."""
    cut = argv.index("--") if "--" in argv else len(argv)
    return argv[:cut], argv[cut + 1 :]


if __name__ == "__main__":
    from echelon.role import main as _main  # not from __main__, which becomes the script's

    _main()

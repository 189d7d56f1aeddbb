"""The command line. Only words and options here; each command imports what it needs when it is called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from echelon.explain.command import plan


class Commands(click.Group):
    """Our errors become one message and an exit code, without a traceback; Ctrl-C before a run began is 130 as well."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None

    def invoke(self, ctx: click.Context) -> Any:
        from echelon.errors import EchelonError

        try:
            return super().invoke(ctx)
        except EchelonError as error:
            click.echo(f"echelon: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(130)
        except RuntimeError as error:
            # Ctrl-C while a class is made, in an import: Python 3.11 wraps it
            if not isinstance(error.__cause__, KeyboardInterrupt):
                raise
            ctx.exit(130)


def _leave(code: int) -> NoReturn:
    """How the run ended is decided: a SIGTERM in the last moment does not change it."""
    from echelon.control.terminated import deaf_to_sigterm

    deaf_to_sigterm()
    sys.exit(code)


def _not_negative(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    if value is not None and value < 0:
        raise click.BadParameter(f"{value} is not a number of processes.")
    return value


def _at_least_one(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise click.BadParameter(f"{value} is not a number of processes; the least is 1.")
    return value


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from importlib import metadata

        try:
            click.echo(f"echelon {metadata.version('echelon-train')}")
        except metadata.PackageNotFoundError:
            click.echo("echelon (from a clone that is not installed)")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
)
def main() -> None:
    """Train a PyTorch script on any number of workers, with the answer that one
    process would give.

    \b
    Examples:
      echelon run --workers 4 train.py --lr 0.1   start a run
      echelon plan --strategy tensor=2 train.py   what a run would do
      echelon runs                                list runs
      echelon status latest                       how a run stands
      echelon logs latest --rank 1                what a worker printed
      echelon stop latest                         end a run
      echelon join 10.0.0.1:29400                 bring in another machine
      echelon bench comm                          what collectives cost here
      echelon serve                               parameter servers, no trainer

    RUN is a name, the beginning of one, a folder, or `latest`.
    """


main.add_command(plan)


class RunCommand(click.Command):
    """--resume takes a run or nothing, and the script follows: told apart before click looks."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--resume" in args:
            from echelon.launch import again

            args = again.spelled(args)
        return super().parse_args(ctx, args)


@main.command(
    cls=RunCommand, context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False}
)
@click.option("--workers", type=int, metavar="N", callback=_at_least_one,
              help="Worker processes.  [default: the number of GPUs, or 1]")  # fmt: skip
@click.option("--servers", type=int, default=0, metavar="M", callback=_not_negative,
              help="Parameter server processes, for --strategy ps.  [default: 0]")  # fmt: skip
@click.option("--strategy", "strategy_text", default="", metavar="S",
              help="How gradients meet and every other knob, comma-separated, such as allreduce,accumulate=4.")  # fmt: skip
@click.option(
    "--set", "settings", multiple=True, metavar="K=V", help="One knob; may be repeated, wins over --strategy."
)
@click.option("--config", type=click.Path(path_type=Path), metavar="F.toml", help="Knobs from a TOML file.")
@click.option("--name", metavar="NAME", help="Name of the run.  [default: script-date-xxxx]")
@click.option("--run-dir", type=click.Path(path_type=Path), metavar="DIR",
              help="Folder of the run.  [default: $ECHELON_RUNS/NAME or runs/NAME]")  # fmt: skip
@click.option("--hosts", "num_hosts", type=int, default=1, metavar="H", callback=_at_least_one,
              help="Machines that take part; the others come with `echelon join`.  [default: 1]")  # fmt: skip
@click.option("--listen", metavar="ADDR[:PORT]",
              help="The address of this machine on which the others reach it; PORT is a free one if left out.")  # fmt: skip
@click.option("--join-timeout-s", type=click.FloatRange(1), default=300.0, show_default=True, metavar="S",
              help="How long to wait for the other hosts.")  # fmt: skip
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.option("--resume", is_flag=False, flag_value="", default=None, metavar="[RUN]",
              help="Go on from the last complete checkpoint of RUN (a name, a folder or a URL; default: of --name, else "
                   "of the newest run of SCRIPT).")  # fmt: skip
@click.option("--grace-s", type=click.FloatRange(min=0.0), default=30.0, show_default=True, metavar="S",
              help="Seconds that SIGTERM leaves for a last checkpoint.")  # fmt: skip
@click.argument("script", metavar="SCRIPT")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def run(
    workers: int | None, servers: int, strategy_text: str, settings: tuple[str, ...], config: Path | None, name: str | None,
    run_dir: Path | None, num_hosts: int, listen: str | None, join_timeout_s: float, module: bool, resume: str | None,
    grace_s: float, script: str, args: tuple[str, ...],
) -> None:  # fmt: skip
    """Train SCRIPT on several worker processes, of this machine or of several.

    What follows SCRIPT is the script's own. The script calls echelon.init() and
    needs no other change; it also runs under plain python.

    \b
    Examples:
      echelon run --workers 4 train.py --lr 0.1
      echelon run --workers 2 --strategy accumulate=4,clip_norm=1 train.py
      echelon run --workers 2 --set seed=7 --name first -m project.train
      echelon run --workers 4 --servers 2 --strategy ps train.py
      echelon run --hosts 2 --listen 10.0.0.1 --workers 8 train.py

    With --hosts, --workers and --servers are totals, dealt evenly over the
    hosts; hosts that join with --workers 0 take all servers. The command for the others is printed; nothing starts until all are there.

    \b
    Knobs of --strategy, --set and --config that are asked for most:
      accumulate=K         K batches of the loader make one optimizer step
      microbatches=M       cut each batch in M pieces to save memory
      batch=per-worker     every worker takes a whole batch (changes the answer)
      precision=bf16       autocast
      clip_norm=X          clip gradients to norm X
      seed=N               weights, data order and sample randomness
      tensorboard=true     write TensorBoard files
      checkpoint_every=N   save everything each N steps, in the background
      checkpoint_dir=URL   where to (default: the run's own folder)

    Every line of the workers is shown with its host and rank, and kept in
    DIR/logs. When a worker fails, all end, and the last lines on the screen are
    the first failure's own traceback.

    SIGTERM to any process of the run stops all of them at one step, with a
    checkpoint, and exit code 75; --resume goes on from there, with any number of
    workers. A second signal ends everything at once.

    \b
    Exit codes: 0, the first failing worker's own, 128+n for signal n,
      2 usage, 69 the workers or hosts did not find each other, 75 stopped with a
      complete checkpoint, 124 a worker held up the run, 130 Ctrl-C.
    """
    from echelon.launch import local, start

    each = (local.count_gpus() or 1) * num_hosts
    job = local.Job(script, args, module, workers if workers is not None else each, servers)
    start.check_script(job)
    chosen, set_by_user = start.choose_strategy(strategy_text, settings, config)
    reach = start.Reach(num_hosts, listen, join_timeout_s)
    kept = start.Kept(resume, grace_s)
    _leave(start.run(job, chosen, set_by_user, name=name, run_dir=run_dir, reach=reach, kept=kept))


@main.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--token-file", type=click.Path(path_type=Path), metavar="F",
              help="A file of mode 0600 with the run's token.  [default: $ECHELON_TOKEN_FILE, or $ECHELON_TOKEN]")  # fmt: skip
@click.option("--workers", type=int, metavar="n", callback=_not_negative,
              help="How many of the run's workers run here; 0: servers only.  [default: an even share]")  # fmt: skip
@click.option("--interface", metavar="I",
              help="Talk to the others over this interface.  [default: the one on the route to the first host]")  # fmt: skip
@click.option("--join-timeout-s", type=click.FloatRange(1), default=300.0, show_default=True, metavar="S",
              help="How long to wait for the first host and the others.")  # fmt: skip
def join(
    address: str, token_file: Path | None, workers: int | None, interface: str | None, join_timeout_s: float
) -> None:
    """Bring this machine into a run that `echelon run --hosts` started.

    HOST:PORT is what the first host printed. Start it in the folder of the
    script, before or after the first host: it waits. The script must be the
    same, byte for byte.

    \b
    Examples:
      echelon join 10.0.0.1:29400 --token-file token
      ECHELON_TOKEN=... echelon join 10.0.0.1:29400 --workers 4

    It shows what the workers of this machine print, and exits with the run's
    code.
    """
    from echelon.launch import joining

    _leave(joining.join(address, token_file, workers, interface, join_timeout_s))


@main.command()
@click.option("--listen", metavar="ADDR[:PORT]",
              help="The address to serve on; further servers take the ports after PORT.  [default: 127.0.0.1, free ports]")  # fmt: skip
@click.option("--servers", type=int, default=1, show_default=True, metavar="N", callback=_at_least_one,
              help="Server processes, over which tables are spread.")  # fmt: skip
@click.option("--token-file", type=click.Path(path_type=Path), metavar="F",
              help="A file of mode 0600 with the token that clients need; made if it is not there.  "
                   "[default: $ECHELON_TOKEN, or a fresh one in a new file]")  # fmt: skip
def serve(listen: str | None, servers: int, token_file: Path | None) -> None:
    """Parameter servers without a trainer, until Ctrl-C.

    They hold named tables of float32 or float64 values, each with its
    optimizer. Programs use them through echelon.ps.connect, which takes the
    address that is printed here and the token.

    \b
    Examples:
      echelon serve
      echelon serve --servers 2 --listen 10.0.0.1:4700 --token-file token

    \b
      import echelon, torch
      with echelon.ps.connect("10.0.0.1:4700,10.0.0.1:4701") as ps:
          ps.create("w", torch.zeros(1000), "adam", lr=1e-3)
          w = ps.push_pull("w", torch.ones(1000)).wait()

    Tables are in memory, and end with their server.
    """
    from echelon.launch import serve as serving

    _leave(serving.serve(listen, servers, token_file))


@main.command()
def runs() -> None:
    """List the runs of this folder, the newest last."""
    from echelon.show import reports

    click.echo("\n".join(reports.runs_table()))


@main.command()
@click.argument("run_name", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def status(run_name: str, as_json: bool) -> None:
    """How RUN stands: its processes, and where each worker is."""
    from echelon.launch import rundir
    from echelon.show import reports

    report = reports.status(rundir.find(run_name))
    if as_json:
        import json

        click.echo(json.dumps(report, indent=1))
    else:
        click.echo("\n".join(reports.status_lines(report)))


@main.command()
@click.argument("run_name", metavar="RUN")
@click.option(
    "--rank",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Which worker, or which other process of --role.",
)
@click.option("--role", type=click.Choice(["worker", "server", "coordinator", "guard"]), default="worker", show_default=True,
              help="Whose log.")  # fmt: skip
@click.option("--follow", "-f", is_flag=True, help="Go on as it grows, until the run is over.")
def logs(run_name: str, rank: int, role: str, follow: bool) -> None:
    """Print everything that one worker of RUN wrote, byte for byte; with --role server
    a parameter server."""
    from echelon.launch import rundir
    from echelon.show import reports

    for piece in reports.log(rundir.find(run_name), role, rank, follow=follow):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


@main.command()
@click.argument("run_name", metavar="RUN")
def stop(run_name: str) -> None:
    """End RUN: all its processes, within seconds."""
    from echelon.launch import rundir, stopping

    click.echo(stopping.stop(rundir.find(run_name)))


@main.group()
def bench() -> None:
    """Measure this machine or cluster."""


@bench.command("comm")
@click.option("--workers", type=int, default=2, show_default=True, metavar="N", callback=_at_least_one,
              help="Worker processes that talk to each other.")  # fmt: skip
@click.option(
    "--backends",
    default="native,gloo",
    show_default=True,
    metavar="B,B",
    help="What to measure, side by side.",
)
@click.option("--ops", default="all_reduce", show_default=True, metavar="O,O",
              help="Operations: all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, all_to_all, send, "
                   "barrier.")  # fmt: skip
@click.option(
    "--sizes",
    default="1KiB,64KiB,1MiB,25MiB",
    show_default=True,
    metavar="S,S",
    help="Bytes of a rank's tensor.",
)
@click.option(
    "--rounds", type=click.IntRange(1), metavar="R", help="Rounds a cell.  [default: 20 to 60, by size]"
)
@click.option("--hosts", "num_hosts", type=int, default=1, metavar="H", callback=_at_least_one,
              help="Machines that take part, as for `echelon run`.  [default: 1]")  # fmt: skip
@click.option(
    "--listen", metavar="ADDR[:PORT]", help="With --hosts: the address of this machine for the others."
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    metavar="F",
    help="Write everything measured to F.",
)
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), metavar="F.svg",
              help="Draw time over size of the first operation.")  # fmt: skip
def bench_comm(
    workers: int, backends: str, ops: str, sizes: str, rounds: int | None, num_hosts: int, listen: str | None,
    json_file: Path | None, plot_file: Path | None,
) -> None:  # fmt: skip
    """Time collective operations: every backend in turn, in one run.

    \b
    Examples:
      echelon bench comm
      echelon bench comm --workers 4 --ops all_reduce,all_gather --plot comm.svg
      echelon bench comm --workers 8 --hosts 2 --listen 10.0.0.1

    Times are medians over rounds, of the slowest worker; a round is 3 (large)
    to 20 (small) calls in a row, divided by them. "against" is how many
    times faster than the slowest row; "limit" is the share of a bare loop over
    the same shared memory, which nothing beats by much.
    """
    from echelon.bench import comm, plot, start

    chosen = [word.strip() for word in backends.split(",")]
    wanted = comm.parse_ops(ops)
    asked = {
        "backends": chosen,
        "ops": wanted,
        "sizes": comm.parse_sizes(sizes),
        "rounds": rounds,
    }
    options = ["--hosts", str(num_hosts)] if num_hosts > 1 else []
    cells = start.measure(asked, workers, [*options, *(["--listen", listen] if listen else [])])
    click.echo("\n".join(comm.table(cells)))
    if json_file is not None:
        import json

        json_file.write_text(json.dumps(comm.record(cells, start.about() | {"workers": workers}), indent=1))
    if plot_file is not None:
        first = wanted[0]
        plot_file.write_text(plot.svg(cells, first, f"{first}, {workers} workers"))

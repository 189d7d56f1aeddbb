"""The command `echelon plan`: its words and options."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--workers", type=click.IntRange(1), metavar="N",
              help="Worker processes that there would be.  [default: the number of GPUs, or 1]")  # fmt: skip
@click.option("--servers", type=click.IntRange(0), default=0, metavar="M",
              help="Parameter server processes, for --strategy ps.  [default: 0]")  # fmt: skip
@click.option("--strategy", "strategy_text", default="", metavar="S", help="As for `echelon run`.")
@click.option("--set", "settings", multiple=True, metavar="K=V", help="One knob; may be repeated.")
@click.option("--config", type=click.Path(path_type=Path), metavar="F.toml", help="Knobs from a TOML file.")
@click.option("--explain", is_flag=True, help="Module by module, with the reasons.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module's name, as in python -m.")
@click.argument("script", metavar="SCRIPT")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def plan(
    workers: int | None, servers: int, strategy_text: str, settings: tuple[str, ...], config: Path | None, explain: bool,
    module: bool, script: str, args: tuple[str, ...],
) -> None:  # fmt: skip
    """What `echelon run` with the same options would do with SCRIPT's model: how
    it is split or cut, and what that takes in memory.

    SCRIPT runs in this process up to its run.prepare (under pipeline: into its
    first run.step, because a cut needs inputs) and is left there. Nothing is
    trained. What it prints goes to stderr, the plan to stdout.

    \b
    Examples:
      echelon plan --workers 2 --strategy tensor=2 --explain train.py
      echelon plan --workers 4 --strategy pipeline=4,microbatches=8 train.py
      echelon plan --workers 4 --strategy sharded train.py --layers 48

    \b
    Exit codes: 0, the script's own, 2 usage, or a strategy that does not suit
      the model: the reason is printed.
    """
    from echelon.launch import local, start

    job = local.Job(
        script, args, module, workers if workers is not None else local.count_gpus() or 1, servers
    )
    start.check_script(job)
    chosen, set_by_user = start.choose_strategy(strategy_text, settings, config)
    start.check_size(job, chosen)
    from echelon.explain import rehearsal

    click.echo("\n".join(rehearsal.rehearse(job, set_by_user, explain)))

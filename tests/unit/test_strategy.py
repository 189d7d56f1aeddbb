"""Strategies: three spellings of one record, and errors that name the nearest word."""

from __future__ import annotations

import itertools

import pytest

from echelon import demands, strategy
from echelon.errors import StrategyError
from echelon.strategy import Strategy, merge, parse, require_built, require_servers, require_whole


def test_string_toml_and_python_are_the_same(tmp_path):
    (tmp_path / "s.toml").write_text(
        'strategy = "allreduce,accumulate=4"\nseed = 7\nema = 0.9\nsync_batchnorm = false\n'
    )
    python = Strategy(accumulate=4, seed=7, ema=0.9, sync_batchnorm=False)
    assert strategy.merge(strategy.load(tmp_path / "s.toml")) == python
    assert (
        strategy.merge(strategy.parse("allreduce,accumulate=4,seed=7,ema=0.9,sync_batchnorm=false")) == python
    )
    assert strategy.merge(strategy.parse(str(python))) == python


def test_precedence():
    layers = [
        {"seed": 1},
        {"seed": 2, "accumulate": 2},
        {"accumulate": 3, "keep": 5},
        {"keep": 6, "ema": 0.5},
    ]
    merged = strategy.merge(*layers)
    assert (merged.seed, merged.accumulate, merged.keep, merged.ema) == (1, 2, 5, 0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alreduce", "Did you mean allreduce?"),
        ("accumlate=3", "Did you mean accumulate?"),
        ("allreduce,ps", "two forms, allreduce and ps"),
        ("seed=1,seed=2", "seed twice"),
        ("accumulate=0", "at least 1"),
        ("accumulate=x", "not a whole number"),
        ("batch=perworker", "Did you mean per-worker?"),
        ("sync_batchnorm=maybe", "neither true nor false"),
        ("ema=1.5", "must lie in"),
        ("warmup_steps=3", "goes with batch=per-worker"),
        ("compress=in8", "Did you mean int8?"),
        ("compress=onebit", "Did you mean 1bit?"),
        ("compress=topk:2", "must lie in"),
        ("compress=topk:many", "not a number"),
        ("compress=powersgd:1.5", "a whole number from 1 to 128"),
        ("compress=int8:4", "takes no number"),
        ("update=async", "goes with ps, not with allreduce"),
        ("ps,staleness=2", "goes with update=bounded, not with sync"),
        ("ps,update=bounded,staleness=-1", "below 0"),
        ("ps,update=async,checkpoint_every=5", "every worker counts its own"),
        ("ps,update=async,compress=fp16", "take gradients as they are"),
        ("ps,servers_share=2", "is no share"),
        ("ps,local_steps=4", "goes with update=local"),
        ("ps,update=async,outer=diloco", "goes with update=local"),
        ("ps,update=local,outer_lr=1", "no outer optimizer"),
        ("ps,update=local,outer=diloco,outer_momentum=1", "below 1"),
        ("ps,update=local,outer=sgd", "Choose from mean, geo, diloco"),
        ("ps,update=local,apply=server", "own copy"),
        ("ps,update=local,batch=per-worker", "whole batches already"),
        ("ps,update=local,ema=0.9", "its own copy"),
        ("ps,update=local,compress=fp16", "take gradients as they are"),
        ("ps,update=local,checkpoint_every=5", "every worker counts its own"),
        ("allreduce,update=local", "goes with ps"),
        ("ps,apply=server,replicas=2", "one copy of what a server holds, or none"),
        ("ps,replicas=1", "servers hold something"),
        ("level=2", "level goes with sharded"),
        ("pipeline=3+1,data=2", r"how many workers each stage has(.|\n)*write pipeline=6\+2"),
        ("pipeline=2+2,tensor=2", "Leave tensor out"),
        ("pipeline=3+1,schedule=interleaved", r"pipeline=3\+1 gives a stage several workers"),
        ("pipeline=2+2,schedule=interleaved", "Write schedule=1f1b"),
        ("pipeline=3+1,shares=2:1+1", "One number for each worker of each stage: shares=1:1:1\\+1"),
        ("pipeline=3+1,shares=2:0:1+1", "not whole numbers"),
        ("pipeline=2,shares=1+1", "every stage has one worker"),
        ("shares=1+1", "shares goes with pipeline"),
        ("sharded,compress=int8", "gradients are sent as they are"),
        ("ps,apply=server,pipeline=2", "with tensor or pipeline it is split"),
    ],
)
def test_mistakes_teach(text, said):
    with pytest.raises(StrategyError, match=said.replace("?", r"\?")):
        strategy.require_whole(strategy.merge(strategy.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "auto",
        "slices=8",
    ],
)
def test_what_is_not_built_yet_says_so(text):
    with pytest.raises(StrategyError, match="does not have"):
        strategy.require_built(strategy.merge(strategy.parse(text)))


def test_every_field_has_a_sentence():
    import ast
    import inspect

    body = next(n for n in ast.parse(inspect.getsource(strategy)).body if isinstance(n, ast.ClassDef)).body
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(after, ast.Expr), f"{field.target.id} has no sentence"


@pytest.mark.case("ps and servers go together")
@pytest.mark.parametrize(
    ("text", "num_servers", "wrong"),
    [
        ("ps", 1, ""),
        ("ps,apply=server", 3, ""),
        ("allreduce", 0, ""),
        ("ps", 0, "needs parameter servers"),
        ("", 2, "--servers 2 goes with the strategy ps"),
    ],
)
def test_ps_and_servers_go_together(text, num_servers, wrong):
    chosen = merge(parse(text))
    require_built(chosen)
    if wrong:
        with pytest.raises(StrategyError, match=wrong):
            require_servers(chosen, num_servers)
    else:
        require_servers(chosen, num_servers)


def test_a_server_applies_only_where_there_is_one():
    require_whole(merge(parse("ps,apply=server")))
    with pytest.raises(StrategyError, match="compress=int8 with apply=server"):
        require_whole(merge(parse("ps,apply=server,compress=int8")))
    with pytest.raises(StrategyError, match="apply=server goes with ps"):
        require_whole(merge(parse("apply=server")))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ps,backup=1,aggregate=2", "both say how many parts"),
        ("ps,update=async,backup=1", "goes with ps and update=sync"),
        ("allreduce,backup=1", "goes with ps and update=sync"),
        ("ps,compensation=0.1", "goes with update=async"),
        ("ps,update=bounded,stale_lr=divided", "goes with update=async"),
    ],
)
def test_fields_of_workers_that_take_batches_by_themselves_go_together(text, words):
    with pytest.raises(StrategyError, match=words):
        require_whole(merge(parse(text)))


@pytest.mark.parametrize(
    ("text", "with_one", "with_two"),
    [
        ("ps", 0, 0),
        ("ps,apply=server", 0, 1),
        ("ps,update=bounded,staleness=2", 0, 1),
        ("ps,update=async", 0, 1),
        ("ps,backup=1", 0, 1),
        ("ps,aggregate=3", 0, 1),
        ("ps,backup=1,replicas=1", 0, 1),
        ("ps,backup=1,replicas=0", 0, 0),
        ("ps,update=local", 0, 0),
    ],
)
def test_what_servers_hold_has_a_copy_where_there_is_a_second_one(text, with_one, with_two):
    strategy = merge(parse(text))
    require_whole(strategy)
    assert (strategy.copies(1), strategy.copies(2)) == (with_one, with_two)


def test_somebody_must_be_waited_for():
    with pytest.raises(StrategyError, match="leaves nobody"):
        demands.workers(merge(parse("ps,backup=2")), 2)
    demands.workers(merge(parse("ps,backup=2")), 3)

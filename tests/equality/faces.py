"""The public face under several strategies: each check runs on every rank of one launch and says what it found."""

import math
import os
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.equality import features
from tests.equality.features import Plain, data, fit, net, sgd, shuffled, weights
from tests.equality.zoo import D
from tests.runs import rates_of_steps, run_beside

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
CHECKS = {}


def check(**fields):
    def put(fn):
        CHECKS[fn.__name__] = (fields, fn)
        return fn

    return put


def same(mine, theirs, bound=1e-10):
    for k, v in theirs.items():
        difference = float((mine[k].double() - v.double()).abs().max())
        assert difference <= bound, f"{k} differs by {difference}"


@check(clip_norm=0.05)
def clip_norm(run):
    def between(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    same(fit(run, net(), shuffled(data())), fit(Plain(), net(), shuffled(data()), between=between))


@check(loss="sum")
def loss_sum(run):
    def loss(out, y):
        return F.cross_entropy(out, y, reduction="sum") * 0.05

    same(fit(run, net(), shuffled(data()), loss=loss), fit(Plain(), net(), shuffled(data()), loss=loss))


@check(accumulate=3)
def mean_over_a_group(run):
    """Tokens counted over the whole group, whatever each part holds."""
    x, y = data().tensors
    keep = x[:, 0] > -0.3
    model = net()
    model, opt, loader = run.prepare(model, sgd(model), shuffled(TensorDataset(x, y, keep)))
    for a, b, k in loader:
        total = F.cross_entropy(model(a), b, reduction="none")[k].sum()
        run.mean(total, k.sum()).backward()
        opt.step()
        opt.zero_grad()
    plain = net()
    opt = sgd(plain)
    batches = list(shuffled(TensorDataset(x, y, keep)))
    for at in range(0, len(batches), 3):
        group = batches[at : at + 3]
        tokens = sum(int(k.sum()) for _, _, k in group)
        for a, b, k in group:
            (F.cross_entropy(plain(a), b, reduction="none")[k].sum() / tokens).backward()
        opt.step()
        opt.zero_grad()
    same(weights(model), weights(plain))


@check(accumulate=2, microbatches=2)
def a_gan_that_accumulates(run):
    """zero_grad in mid-group withdraws the other model's leftovers and keeps what was stepped on."""
    torch.manual_seed(7)
    g = torch.Generator().manual_seed(2)
    pairs = TensorDataset(torch.randn(20, 2, generator=g, dtype=D), torch.randn(20, 3, generator=g, dtype=D))

    def models():
        torch.manual_seed(7)
        make = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).to(D)
        tell = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1)).to(D)
        return make, tell, torch.optim.SGD(tell.parameters(), 0.1), torch.optim.SGD(make.parameters(), 0.1)

    bce = F.binary_cross_entropy_with_logits

    def tell_loss(make, tell, real, noise):
        yes, no = tell(real), tell(make(noise).detach())
        return bce(yes, torch.ones_like(yes)) + bce(no, torch.zeros_like(no))

    def make_loss(make, tell, noise):
        verdict = tell(make(noise))
        return bce(verdict, torch.ones_like(verdict))

    make, tell, opt_tell, opt_make = models()
    make, tell, opt_tell, opt_make, loader = run.prepare(
        make, tell, opt_tell, opt_make, DataLoader(pairs, batch_size=5)
    )
    for real, noise in loader:
        opt_tell.zero_grad()
        tell_loss(make, tell, real, noise).backward()
        opt_tell.step()
        opt_make.zero_grad()
        make_loss(make, tell, noise).backward()
        opt_make.step()
    ours = weights(make, tell)
    make, tell, opt_tell, opt_make = models()
    batches = list(
        DataLoader(pairs, batch_size=10)
    )  # two batches of 5 are one step: both see the weights before it
    for real, noise in batches:
        opt_tell.zero_grad()
        tell_loss(make, tell, real, noise).backward()
        held = [p.grad.clone() for p in tell.parameters()]
        opt_make.zero_grad()
        make_loss(make, tell, noise).backward()
        for p, grad in zip(tell.parameters(), held, strict=True):
            p.grad = grad
        last = tell.state_dict()
        last = {k: v.clone() for k, v in last.items()}
        opt_tell.step()
        stepped = {k: v.clone() for k, v in tell.state_dict().items()}
        opt_make.zero_grad()
        # the last micro-step's generator loss already sees the stepped discriminator, the three before it do not
        n, parts = len(real), [(0, 3), (3, 5), (5, 8), (8, 10)]
        for i, (lo, hi) in enumerate(parts):
            tell.load_state_dict(stepped if i == len(parts) - 1 else last)
            (make_loss(make, tell, noise[lo:hi]) * ((hi - lo) / n)).backward()
        tell.load_state_dict(stepped)
        opt_make.step()
    same(ours, weights(make, tell))


@check(precision="bf16")
def bf16(run):
    """Autocast by a field: near the full-precision answer, outputs in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    x, y = data().tensors
    mine = fit(run, model, shuffled(TensorDataset(x.float(), y)))
    assert model(x.float()).dtype == torch.float32
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    same(mine, fit(Plain(), plain, shuffled(TensorDataset(x.float(), y))), bound=0.05)


@check()
def bf16_autocast_in_the_script(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    x, y = data().tensors
    model, opt, loader = run.prepare(model, sgd(model), shuffled(TensorDataset(x.float(), y)))
    for a, b in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(a), b)
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert all(torch.isfinite(p).all() for p in model.parameters())


@check(ema=0.9)
def ema(run):
    model = net()
    model, opt, loader = run.prepare(model, sgd(model), shuffled(data()))
    average = [p.detach().clone() for p in model.parameters()]
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        average = [0.9 * a + 0.1 * p.detach() for a, p in zip(average, model.parameters(), strict=True)]
    live = [p.detach().clone() for p in model.parameters()]
    path = run.save(OUT / f"ema-{run.world_size}", model)
    from safetensors.torch import load_file

    saved = load_file(path)
    assert saved.keys() == dict(model.named_parameters()).keys()
    for (name, _), a in zip(model.named_parameters(), average, strict=True):
        assert torch.allclose(saved[name], a, atol=1e-12)
    found = run.evaluate(
        model,
        DataLoader(data(), batch_size=5),
        lambda m, b: {"w": (m[0].weight.sum() * len(b[0]), len(b[0]))},
    )
    assert abs(found["w"] - float(average[0].sum())) < 1e-9
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), live, strict=True))


@check(batch="per-worker", warmup_steps=3)
def per_worker_with_warm_up(run):
    """Each worker takes whole batches; the learning rate grows from 1 to workers times its value."""
    model, w = net(), run.world_size
    model, opt, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data(), batch_size=4)
    )
    assert len(loader) == math.ceil(6 / w)
    rates = rates_of_steps(opt)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    expected = [0.1 * (1 + (w - 1) * min(1.0, (s + 1) / 4)) for s in range(len(rates))]
    assert rates == [float(f"{e}") for e in expected] or all(
        abs(a - b) < 1e-12 for a, b in zip(rates, expected, strict=True)
    )
    assert opt.param_groups[0]["lr"] == 0.1, "schedulers and scripts never see the factor"
    plain = net()
    opt = torch.optim.SGD(plain.parameters(), 0.1)
    batches = list(DataLoader(data(), batch_size=4 * w))
    for (x, y), lr in zip(batches, expected, strict=True):
        opt.param_groups[0]["lr"] = lr
        F.cross_entropy(plain(x), y).backward()
        opt.step()
        opt.zero_grad()
    same(weights(model), weights(plain))


@check(accumulate=2)
def every_sees_committed_steps_only(run):
    model = net()
    model, opt, loader = run.prepare(model, sgd(model), DataLoader(data(), batch_size=5))
    seen, steps = 0, []
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        seen += run.every(1)
        steps.append(run.global_step)
    assert steps == [0, 1, 1, 2, 3]
    assert seen == 3


@check()
def reduces(run):
    w, r = run.world_size, run.rank
    assert run.reduce(r + 1, "sum") == w * (w + 1) // 2
    assert run.reduce(float(r), "max") == w - 1
    assert run.reduce(torch.tensor([r, -r]), "min").tolist() == [0, 1 - w]
    assert abs(run.reduce(float(r)) - (w - 1) / 2) < 1e-12
    loader = run.prepare(DataLoader(data(7), batch_size=7))
    for x, _ in loader:
        assert abs(float(run.reduce(x.mean(), "mean")) - float(data(7).tensors[0].mean())) < 1e-12
        assert run.reduce(len(x), "sum") == 7
    small = run.prepare(DataLoader(data(1), batch_size=1))
    for x, _ in small:  # all but one rank hold a stand-in, which counts for nothing
        assert run.reduce(len(x), "sum") == 1
        assert len(run.gather(x)) == 1


@check()
def saves(run):
    model = features.odd()
    model = run.prepare(torch.compile(model, backend="eager"))
    path = run.save(OUT / f"model-{run.world_size}")
    assert path.name == f"model-{run.world_size}.safetensors"
    from safetensors.torch import load_file

    saved = load_file(path)
    assert "embed.weight" in saved
    assert "out.weight" in saved, "tied weights stand under every name"
    assert not any("_orig_mod" in key or key.startswith("module.") for key in saved)
    features.odd(1).load_state_dict(saved)
    other = run.save(OUT / f"plain-{run.world_size}.pt")
    features.odd(1).load_state_dict(torch.load(other, weights_only=True))
    assert not list(OUT.glob("*.partial"))


@check()
def tracks_and_prepares(run):
    from echelon.errors import UsageError

    for wrong in (object(), 3):
        with pytest.raises(UsageError, match="does not know"):
            run.prepare(wrong)
    with pytest.raises(UsageError, match="state_dict"):
        run.track(object())
    model = net()
    optimizer = sgd(model)
    sched = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(data(), batch_size=5)
    back = run.prepare(sched, loader, model, optimizer)
    assert (back[0], back[2], back[3]) == (sched, model, optimizer)
    assert isinstance(back[1], DataLoader)
    assert back[1].dataset is loader.dataset
    assert (back[1].batch_size, len(back[1])) == (5, 5)
    assert run.prepare(model) is model
    assert list(run.epochs(3)) == [0, 1, 2]
    torch.manual_seed(5)
    plain = nn.Linear(3, 3), nn.Linear(3, 3), torch.rand(1)
    torch.manual_seed(5)
    with run.build():
        a = nn.Linear(3, 3)
    with run.build():
        b = nn.Linear(3, 3)
    assert torch.equal(a.weight, plain[0].weight)
    assert torch.equal(b.weight, plain[1].weight)
    assert torch.equal(torch.rand(1), plain[2])


@check()
def weights_equal_at_start_and_streams_differ(run):
    torch.manual_seed(run.rank)  # a script that seeds by rank
    model = run.prepare(nn.Linear(3, 3))
    flat = model.weight.detach().flatten()
    every = run.gather(flat[None])
    assert all(torch.equal(row, every[0]) for row in every)


def scaler_loop(run, plain):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).to(D)
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    if plain:
        loader = shuffled(data())
    else:
        model, opt, loader, scaler = run.prepare(model, opt, shuffled(data()), scaler)
    for x, y in loader:
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return {**weights(model), "scale": torch.tensor(scaler.get_scale())}


@check()
def scaled_gradients(run):
    same(scaler_loop(run, plain=False), scaler_loop(run, plain=True))


@check(accumulate=5)
def scaled_gradients_in_a_group(run):
    mine = scaler_loop(run, plain=False)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).to(D)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).to(D)
    opt = sgd(model)
    x, y = data().tensors
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    opt.step()
    same({k: v for k, v in mine.items() if k != "scale"}, weights(model))


# -- loops as people write them, under a strategy ------------------------------------------------------------------


def learns(run, loop, batch_size=5):
    """`loop(run, model, loader)` under Echelon in batches of 5, and in plain torch in batches of `batch_size`."""
    mine, plain = net(), net()
    loop(run, mine, run.prepare(DataLoader(data(), batch_size=5)))
    loop(Plain(), plain, DataLoader(data(), batch_size=batch_size))
    same(weights(mine), weights(plain))


@check(loss="sum")
def loss_sum_with_two_backwards(run):
    def loop(run, model, loader):
        model, opt = run.prepare(model, sgd(model, 0.01))
        for x, y in loader:
            h = torch.tanh(model[0](x))
            F.cross_entropy(model[2](h), y, reduction="sum").backward(retain_graph=True)
            (h**2).sum().backward()
            opt.step()
            opt.zero_grad()

    learns(run, loop)


@check(clip_norm=0.05)
def a_closure_with_clip_norm(run):
    def loop(run, model, loader):
        model, opt = run.prepare(model, sgd(model))
        for x, y in loader:

            def evaluate(x=x, y=y):
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                if isinstance(run, Plain):
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                return loss

            opt.step(evaluate)

    learns(run, loop)


@check(accumulate=2)
def two_backwards_in_a_group(run):
    def loop(run, model, loader):
        model, opt = run.prepare(model, sgd(model))
        for x, y in loader:
            h = torch.tanh(model[0](x))
            F.cross_entropy(model[2](h), y).backward(retain_graph=True)
            (h**2).mean().backward()
            opt.step()
            opt.zero_grad()

    learns(run, loop, batch_size=10)


@check(accumulate=2)
def gradients_by_hand_in_a_group(run):
    def loop(run, model, loader):
        model, opt = run.prepare(model, sgd(model))
        params = list(model.parameters())
        for x, y in loader:
            for p, g in zip(params, torch.autograd.grad(F.cross_entropy(model(x), y), params), strict=True):
                p.grad = g
            opt.step()
            opt.zero_grad()

    learns(run, loop, batch_size=10)


@check(accumulate=2)
def two_optimizers_with_replaced_gradients_in_a_group(run):
    def loop(run, model, loader):
        matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], 0.1)
        vectors = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], 0.1)
        model, matrices, vectors = run.prepare(model, matrices, vectors)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                if p.grad is not None:  # in mid-group it is None
                    p.grad = p.grad * 0.5
            for opt in (matrices, vectors):
                opt.step()
            for opt in (matrices, vectors):
                opt.zero_grad()

    learns(run, loop, batch_size=10)


def main():
    import echelon
    from echelon.strategy import Strategy

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first = echelon.init()
    assert echelon.init() is first, "a second call returns the same run"
    said = {}
    for name, (fields, fn) in CHECKS.items():
        run = run_beside(first, Strategy(**fields))
        try:
            fn(run)
            said[name] = "fine"
        except Exception:
            said[name] = traceback.format_exc()
            if os.environ.get("LOUD"):
                raise
    torch.save(said, OUT / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()

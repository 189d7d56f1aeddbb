"""One loop a feature, written once and run twice: in plain torch, and under Echelon at some world size.

Each returns tensors that must agree to 1e-10. `Plain` stands for the run in plain torch. Started by `echelon run`; writes results.
"""

import dataclasses
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.equality import zoo
from tests.equality.zoo import D


class Plain:
    """One process without Echelon, under the names of a run."""

    rank, world_size, global_step = 0, 1, 0
    device = torch.device("cpu")

    def prepare(self, *objects, **options):
        objects = tuple(DataLoader(o, **options) if isinstance(o, Dataset) else o for o in objects)
        return objects[0] if len(objects) == 1 else objects

    def mean(self, total, count):
        return total / count

    def gather(self, x):
        return x

    def clip_grad_norm(self, model, limit):
        return nn.utils.clip_grad_norm_(model.parameters(), limit)

    def clip_grad_value(self, model, limit):
        nn.utils.clip_grad_value_(model.parameters(), limit)

    def track(self, obj):
        return obj

    def log(self, **values):
        pass

    def reduce(self, x, op="mean"):
        return x

    def evaluate(self, model, loader, fn):
        model.eval()
        totals = {}
        with torch.no_grad():
            for batch in loader:
                for name, (a, b) in fn(model, batch).items():
                    s, n = totals.get(name, (0.0, 0.0))
                    totals[name] = (s + float(a), n + float(b))
        model.train()
        return {name: s / n for name, (s, n) in totals.items()}

    def step(self, loss_fn, batch, *, model, optimizer, clip_norm=None):
        inputs, target = batch
        out = (
            model(*inputs)
            if isinstance(inputs, tuple)
            else model(**inputs)
            if isinstance(inputs, dict)
            else model(inputs)
        )
        loss = loss_fn(out, target)
        loss.backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


def net(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).to(D)


def data(n=22):
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, generator=g, dtype=D), torch.randint(0, 4, (n,), generator=g))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def shuffled(dataset, **options):
    options = {"batch_size": 5, **options}
    return DataLoader(dataset, shuffle=True, generator=torch.Generator().manual_seed(5), **options)


def weights(*models):
    return {f"{i}.{k}": v.detach().clone() for i, m in enumerate(models) for k, v in m.state_dict().items()}


def fit(run, model, loader, opt=None, loss=F.cross_entropy, unpack=lambda b: b, epochs=2, between=None):
    opt = opt or sgd(model)
    model, opt, loader = run.prepare(model, opt, loader)
    for _ in range(epochs):
        for batch in loader:
            x, y = unpack(batch)
            loss(model(x), y).backward()
            if between:
                between(model)
            opt.step()
            opt.zero_grad()
    return weights(model)


FEATURES = {}


def feature(fn):
    FEATURES[fn.__name__] = fn
    return fn


# -- loaders -------------------------------------------------------------------------------------------------------


@feature
def map_style(run):
    return fit(run, net(), shuffled(data()))


@feature
def num_workers(run):
    return fit(run, net(), shuffled(data(), num_workers=2))


@feature
def persistent_workers(run):
    return fit(run, net(), shuffled(data(), num_workers=1, persistent_workers=True, prefetch_factor=3))


@feature
def drop_last(run):
    return fit(run, net(), shuffled(data(), drop_last=True))


@feature
def collate_fn(run):
    def collate(samples):
        return torch.stack([x for x, _ in samples]) * 2, torch.stack([y for _, y in samples])

    return fit(run, net(), shuffled(data(), collate_fn=collate))


@feature
def sampler(run):
    chosen = WeightedRandomSampler(torch.arange(1.0, 23.0), 17, generator=torch.Generator().manual_seed(2))
    return fit(run, net(), DataLoader(data(), batch_size=5, sampler=chosen))


@feature
def batch_sampler(run):
    order = torch.randperm(22, generator=torch.Generator().manual_seed(4)).tolist()
    return fit(run, net(), DataLoader(data(), batch_sampler=BatchSampler(order, 7, drop_last=False)))


class Drawn(Dataset):
    """Samples with randomness of their own; `init` is set by worker_init_fn."""

    init = 0.0

    def __init__(self):
        self.inner = data()

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        x, y = self.inner[i]
        return x + self.init, y


def init_fn(worker):
    torch.utils.data.get_worker_info().dataset.init = 0.5


@feature
def worker_init_fn(run):
    return fit(run, net(), shuffled(Drawn(), num_workers=2, worker_init_fn=init_fn))


class Stream(IterableDataset):
    def __init__(self, n=22):
        self.inner, self.n = data(n), n

    def __iter__(self):
        return iter([self.inner[i] for i in range(self.n)])


class ReadyMade(IterableDataset):
    def __iter__(self):
        x, y = data().tensors
        return iter([(x[i : i + 5], y[i : i + 5]) for i in range(0, 22, 5)])


class Sharded(Stream):
    """Declares shards: worker r of w reads every w-th sample, so a shard may be longer than another."""

    index, count = 0, 1

    def shard(self, index, count):
        other = Sharded(self.n)
        other.index, other.count = index, count
        return other

    def __iter__(self):
        return iter([self.inner[i] for i in range(self.index, self.n, self.count)])


@feature
def iterable(run):
    return fit(run, net(), DataLoader(Stream(), batch_size=5))


@feature
def iterable_num_workers(run):
    return fit(run, net(), DataLoader(Stream(), batch_size=5, num_workers=2))


@feature
def batch_size_none(run):
    return fit(run, net(), DataLoader(ReadyMade(), batch_size=None))


@feature
def batch_size_none_map_style(run):
    class Batches(Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, i):
            x, y = data().tensors
            return x[5 * i : 5 * i + 5], y[5 * i : 5 * i + 5]

    return fit(run, net(), DataLoader(Batches(), batch_size=None))


@feature
def dict_batches(run):
    class Dicts(Drawn):
        def __getitem__(self, i):
            x, y = self.inner[i]
            return {"x": x, "y": y, "name": f"n{i}"}

    return fit(run, net(), shuffled(Dicts()), unpack=lambda b: (b["x"], b["y"]))


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@feature
def dataclass_and_nested_batches(run):
    def collate(samples):
        pair = Pair(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))
        return {"deep": [pair, (pair.x, {"n": len(samples)})]}

    return fit(
        run, net(), shuffled(data(), collate_fn=collate), unpack=lambda b: (b["deep"][0].x, b["deep"][0].y)
    )


@feature
def prepare_a_dataset(run):
    loader = run.prepare(data(), batch_size=5)
    return fit(run, net(), loader)


@feature
def several_loaders(run):
    a, b = shuffled(data(20)), DataLoader(data(20), batch_size=5)
    model = net()
    model, opt, a, b = run.prepare(model, sgd(model), a, b)
    for _ in range(2):
        for (x, y), (u, v) in zip(a, b, strict=True):
            (F.cross_entropy(model(x), y) + F.cross_entropy(model(u), v)).backward()
            opt.step()
            opt.zero_grad()
        for x, y in b:
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return weights(model)


@feature
def an_evaluation_loop_inside_the_training_loop(run):
    model = net()
    model, opt, loader, test = run.prepare(
        model, sgd(model), shuffled(data()), DataLoader(data(9), batch_size=4)
    )
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            with torch.no_grad():
                for u, _ in test:
                    model(u)
            loss.backward()
            opt.step()
            opt.zero_grad()
    return weights(model)


@feature
def fewer_samples_than_workers(run):
    return fit(run, net(), DataLoader(data(7), batch_size=2, shuffle=False))


# -- models and gradients ------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Frozen, unused, tied and twice-called layers in one model."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.twice, self.never, self.frozen = nn.Linear(8, 8), nn.Linear(3, 3), nn.Linear(8, 8)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        h = torch.tanh(self.twice(self.embed(ids).mean(1)))
        return self.out(torch.tanh(self.twice(self.frozen(h))))


def odd(seed=0):
    torch.manual_seed(seed)
    return Odd().to(D)


def words():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, 20, (22, 5), generator=g), torch.randint(0, 20, (22,), generator=g))


@feature
def frozen_unused_tied_called_twice(run):
    model = odd()
    out = fit(run, model, shuffled(words()), torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1))
    assert model.never.weight.grad is None
    return out


class Sometimes(nn.Module):
    """A layer that only some samples use: on some ranks it has no gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        out = self.a(x)
        chosen = x[:, 0] > 0.8
        if chosen.any():
            out = torch.index_put(out, (chosen,), self.b(x[chosen]))
        return out


@feature
def a_layer_used_on_some_workers_only(run):
    torch.manual_seed(0)
    model = Sometimes().to(D)
    return fit(run, model, shuffled(data()), torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1))


@feature
def a_layer_thawed_in_mid_training(run):
    model = net()
    model[0].requires_grad_(False)
    model, opt, loader = run.prepare(model, sgd(model), shuffled(data()))
    for epoch in range(3):
        if epoch == 1:
            model[0].requires_grad_(True)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return weights(model)


@feature
def sparse_embedding(run):
    model, dataset = zoo.make("table")
    return fit(run, model, shuffled(dataset), torch.optim.Adagrad(model.parameters(), 0.1))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.reentrant = reentrant

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for _ in range(2):  # the same block twice: its hooks fire twice
            h = torch.tanh(checkpoint(self.block, h, use_reentrant=self.reentrant))
        return self.head(h)


@feature
def checkpoint_reentrant(run):
    torch.manual_seed(0)
    return fit(run, Checkpointed(True).to(D), shuffled(data()), between=lambda m: run.clip_grad_norm(m, 0.3))


@feature
def checkpoint_not_reentrant(run):
    torch.manual_seed(0)
    return fit(run, Checkpointed(False).to(D), shuffled(data()), between=lambda m: run.clip_grad_norm(m, 0.3))


class CheckpointedFirst(nn.Module):
    """The checkpointed block comes first: no hook of the outer backward follows it."""

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        return self.head(torch.tanh(checkpoint(self.block, x, use_reentrant=True)))


@feature
def checkpoint_reentrant_first(run):
    torch.manual_seed(0)
    return fit(run, CheckpointedFirst().to(D), shuffled(data()), between=lambda m: run.clip_grad_norm(m, 0.3))


@feature
def torch_compile(run):
    inner = net()
    model = torch.compile(inner, backend="aot_eager")
    fit(run, model, shuffled(data()))
    return weights(inner)


@feature
def closure(run):
    model = net()
    model, opt, loader = run.prepare(model, sgd(model), shuffled(data()))
    for x, y in loader:

        def evaluate(x=x, y=y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(evaluate)
    return weights(model)


@feature
def lbfgs(run):
    model = net()
    model, opt, loader = run.prepare(
        model,
        torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
        DataLoader(data(), batch_size=11),
    )
    for x, y in loader:

        def evaluate(x=x, y=y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(evaluate)
    return weights(model)


@feature
def accumulation_by_hand(run):
    model = net()
    model, opt, loader = run.prepare(model, sgd(model), shuffled(data()))
    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / 2).backward()
            if i % 2 or i + 1 == len(loader):
                opt.step()
                opt.zero_grad()
    return weights(model)


@feature
def accumulation_by_hand_with_a_rest(run):
    """5 batches, a step every 3: the rest is stepped on after the loop, or in the next epoch."""
    model = net()
    model, opt, loader = run.prepare(model, sgd(model), shuffled(data()))
    for epoch in range(4):
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / 3).backward()
            if i % 3 == 2:
                opt.step()
                opt.zero_grad()
        if epoch % 2:
            opt.step()
            opt.zero_grad()
    return weights(model)


@feature
def two_losses_two_backwards(run):
    model = net()
    model, opt, loader = run.prepare(model, sgd(model), shuffled(data()))
    for x, y in loader:
        h = torch.tanh(model[0](x))
        F.cross_entropy(model[2](h), y).backward(retain_graph=True)
        (h**2).mean().backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
    return weights(model)


@feature
def gradient_penalty_create_graph(run):
    model = net()
    model, opt, loader = run.prepare(model, sgd(model), shuffled(data()))
    for x, y in loader:
        x = x.requires_grad_(True)
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (F.cross_entropy(out, y) + (grad**2).sum(1).mean()).backward()
        opt.step()
        opt.zero_grad()
    return weights(model)


@feature
def clip_by_value_and_torch_clipping(run):
    def between(model):
        run.clip_grad_value(model, 0.02)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    return fit(run, net(), shuffled(data()), between=between)


@feature
def loose_parameters(run):
    """An optimizer over tensors that no module holds."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(6, 4, dtype=D))
    opt, loader = run.prepare(torch.optim.SGD([w], lr=0.1), shuffled(data()))
    for x, y in loader:
        F.cross_entropy(x @ w, y).backward()
        opt.step()
        opt.zero_grad()
    return {"w": w.detach().clone()}


@feature
def batchnorm_1d_and_scheduler_per_epoch(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).to(D)
    opt = sgd(model)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    model, opt, loader, sched = run.prepare(model, opt, shuffled(data()), sched)
    for _ in range(3):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        sched.step()
    return {**weights(model), "lr": torch.tensor(sched.get_last_lr())}


@feature
def plateau_scheduler_agrees(run):
    model = net()
    opt = sgd(model)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    model, opt, loader, sched = run.prepare(model, opt, shuffled(data(20)), sched)
    for _ in range(4):
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            total += float(run.reduce(loss.detach()))
        sched.step(total)
    return {**weights(model), "lr": torch.tensor([g["lr"] for g in opt.param_groups])}


@feature
def gan(run):
    torch.manual_seed(7)
    g = torch.Generator().manual_seed(2)
    pairs = TensorDataset(torch.randn(22, 2, generator=g, dtype=D), torch.randn(22, 3, generator=g, dtype=D))
    make = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).to(D)
    tell = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1)).to(D)
    opt_tell, opt_make = torch.optim.Adam(tell.parameters(), 0.01), torch.optim.Adam(make.parameters(), 0.01)
    make, tell, opt_tell, opt_make, loader = run.prepare(make, tell, opt_tell, opt_make, shuffled(pairs))
    bce = F.binary_cross_entropy_with_logits
    for _ in range(2):
        for real, noise in loader:
            opt_tell.zero_grad()
            fake = make(noise)
            yes, no = tell(real), tell(fake.detach())
            (bce(yes, torch.ones_like(yes)) + bce(no, torch.zeros_like(no))).backward()
            opt_tell.step()
            opt_make.zero_grad()
            verdict = tell(fake)
            bce(verdict, torch.ones_like(verdict)).backward()
            opt_make.step()
    return weights(make, tell)


# -- values across ranks -------------------------------------------------------------------------------------------


@feature
def run_mean_over_unequal_counts(run):
    model, loader = net(), shuffled(data())
    model, opt, loader = run.prepare(model, sgd(model), loader)
    seen = []
    for _ in range(2):
        for x, y in loader:
            keep = x[:, 0] > -0.2
            total = F.cross_entropy(model(x), y, reduction="none")[keep].sum()
            loss = run.mean(total, keep.sum())
            (loss + 0.1 * (model(x) ** 2).mean()).backward()
            opt.step()
            opt.zero_grad()
            seen.append(loss.detach())
    return {**weights(model), "losses": torch.stack(seen)}


@feature
def run_gather_in_batch_negatives(run):
    model, loader = net(), shuffled(data())
    model, opt, loader = run.prepare(model, sgd(model, 0.5), loader)
    seen = []
    for _ in range(2):
        for x, _ in loader:
            a, b = F.normalize(model(x), dim=1), F.normalize(model(x.flip(1)), dim=1)
            a, b = run.gather(a), run.gather(b)
            scores = a @ b.T * 3
            loss = F.cross_entropy(scores, torch.arange(len(scores)))
            loss.backward()
            opt.step()
            opt.zero_grad()
            seen.append(loss.detach())
    return {**weights(model), "losses": torch.stack(seen)}


@feature
def run_step(run):
    model, loader = net(), shuffled(data())
    model, opt, loader = run.prepare(model, sgd(model), loader)
    losses = [run.step(F.cross_entropy, batch, model=model, optimizer=opt, clip_norm=0.3) for batch in loader]
    return {**weights(model), "losses": torch.stack(losses)}


@feature
def run_evaluate(run):
    model = net()
    test = DataLoader(data(21), batch_size=8)
    model, _loader, test = run.prepare(model, shuffled(data()), test)

    def fn(model, batch):
        x, y = batch
        out = model(x)
        return {
            "loss": (F.cross_entropy(out, y, reduction="sum"), len(y)),
            "right": ((out.argmax(1) == y).sum(), len(y)),
        }

    first, again = run.evaluate(model, test, fn), run.evaluate(model, DataLoader(data(2), batch_size=8), fn)
    return {
        "first": torch.tensor([first["loss"], first["right"]]),
        "again": torch.tensor([again["loss"], again["right"]]),
    }


def main():
    import echelon
    from echelon.strategy import Strategy
    from tests.equality import features, scripts  # noqa: F401  scripts adds to the imported module, not to this __main__
    from tests.runs import run_beside

    every = features.FEATURES
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first = echelon.init()
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else list(every)
    strategy = Strategy(compress=sys.argv[3] if len(sys.argv) > 3 else "none")
    results = {}
    for name in chosen:
        run = run_beside(first, strategy)
        results[name] = every[name](run)
    torch.save(results, Path(sys.argv[1]) / f"rank-{first.rank}.pt")


if __name__ == "__main__":
    main()

"""Loops as people write them, beyond one feature each: several iterators, models that change, gradients by hand.

Same rules as in features.py, where each of them registers: run twice, in plain torch and under Echelon, to 1e-10.
Most loaders end with a batch of one or two samples, so that some workers hold no sample of it.
"""

import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import lr_scheduler
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

from tests.equality.features import Plain, data, feature, fit, net, sgd, shuffled, weights
from tests.equality.zoo import D


def learn(loss, *optimizers):
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def straight(n=21, batch_size=5, **options):
    return DataLoader(data(n), batch_size=batch_size, **options)


def ready(run, loader=None, lr=0.1):
    model = net()
    return run.prepare(model, sgd(model, lr), shuffled(data()) if loader is None else loader)


# -- loops over loaders --------------------------------------------------------------------------------------------


@feature
def zip_of_one_loader_with_itself(run):
    model, opt, loader = ready(run, straight())
    for (x, y), (u, v) in zip(loader, loader, strict=True):
        learn(F.cross_entropy(model(x), y) + F.cross_entropy(model(u.flip(1)), v), opt)
    return weights(model)


@feature
def a_peek_inside_the_loop(run):
    model, opt, loader = ready(run, straight(20))
    count = 0
    for x, y in loader:
        u, v = next(iter(loader))
        learn(F.cross_entropy(model(x), y) + F.cross_entropy(model(u), v), opt)
        count += 1
        assert count <= 4, "the peek started the loop again"
    return {**weights(model), "count": torch.tensor(count)}


@feature
def a_peek_draws_from_an_explicit_generator(run):
    """Each peek is an epoch of its own to the loader's generator, so the order of later epochs changes."""
    model, opt, loader = ready(run)
    peeked = []
    for _ in range(2):
        for x, y in loader:
            peeked.append(next(iter(loader))[0])
            learn(F.cross_entropy(model(x), y), opt)
    return {**weights(model), "peeks": torch.tensor(len(peeked))}


@feature
def a_first_look_at_a_batch(run):
    model, opt, loader = ready(run, straight())
    for x, _ in loader:
        assert x.shape[1] == 6
        break
    return fit(run, model, loader, opt)


@feature
def an_iterator_that_stays_open(run):
    """An old iterator ends while a loop over the same loader is between forward and backward."""
    model, opt, loader = ready(run, straight())
    held, count = iter(loader), 0
    next(held)
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            count += 1
            if count == 3:
                held = None
            learn(loss, opt)
    return weights(model)


@feature
def evaluate_on_the_training_loader_in_mid_epoch(run):
    model, opt, loader = ready(run)
    losses = []

    def judge(model, batch):
        x, y = batch
        return {"loss": (F.cross_entropy(model(x), y, reduction="sum"), len(y))}

    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            learn(F.cross_entropy(model(x), y), opt)
            if i == 1:
                losses.append(run.evaluate(model, loader, judge)["loss"])
    return {**weights(model), "losses": torch.tensor(losses, dtype=D)}


@feature
def an_explicit_generator_and_an_early_break(run):
    model, opt, loader = ready(run)
    for _ in range(3):
        for i, (x, y) in enumerate(loader):
            learn(F.cross_entropy(model(x), y), opt)
            if i == 1:
                break
    return weights(model)


@feature
def next_without_an_end(run):
    """The loop of scripts that count steps: next(), and a new iterator when one ends."""
    model, opt, loader = ready(run)
    batches = iter(loader)
    for _ in range(13):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        learn(F.cross_entropy(model(x), y), opt)
    return weights(model)


@feature
def islice_with_persistent_workers(run):
    model, opt, loader = ready(run, shuffled(data(), num_workers=1, persistent_workers=True))
    for epoch in range(3):
        for i, (x, y) in enumerate(itertools.islice(loader, 3)):
            learn(F.cross_entropy(model(x), y), opt)
            if epoch == 1 and i == 1:
                break
    return weights(model)


class Adaptive(Sampler):
    """The next sample follows from what the script set after the last step."""

    at = 0

    def __iter__(self):
        for _ in range(21):
            yield self.at % 22

    def __len__(self):
        return 21


@feature
def an_adaptive_sampler(run):
    chosen = Adaptive()
    model, opt, loader = ready(run, DataLoader(data(), batch_size=4, sampler=chosen))
    for x, y in loader:
        learn(F.cross_entropy(model(x), y), opt)
        chosen.at += 3
    return weights(model)


@feature
def batches_of_unequal_sizes(run):
    sizes = [[0], [1, 2, 3, 4], [5, 6], list(range(7, 22))]
    return fit(run, net(), DataLoader(data(), batch_sampler=sizes))


@feature
def single_samples_of_joined_subsets(run):
    joined = ConcatDataset([Subset(data(), [3, 4, 5, 6, 7, 9]), data(9)])
    return fit(run, net(), shuffled(joined, batch_size=1))


@feature
def random_split_after_prepare(run):
    """The split is drawn from torch's generator, which stands at the same place on all workers until the first batch."""
    model = net()
    model, opt = run.prepare(model, sgd(model))
    train, test = random_split(data(), [12, 10])
    out = fit(run, model, shuffled(train), opt)
    return {**out, "train": torch.tensor(train.indices), "test": torch.tensor(test.indices)}


class Columns(Dataset):
    """Fetches a batch at once, as a dict of columns."""

    def __init__(self):
        self.x, self.y = data().tensors

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}

    def __getitems__(self, ids):
        return {"x": self.x[ids], "y": self.y[ids]}


def as_it_is(batch):
    return batch


@feature
def getitems_that_returns_columns(run):
    loader = DataLoader(Columns(), batch_size=5, collate_fn=as_it_is)
    return fit(run, net(), loader, unpack=lambda b: (b["x"], b["y"]))


class File(Dataset):
    """Opened in each loader process: without its worker_init_fn there is nothing to read."""

    rows = None

    def __len__(self):
        return 22

    def __getitem__(self, i):
        return self.rows[i]


def open_file(worker):
    get_worker_info().dataset.rows = data()


@feature
def a_dataset_that_worker_init_fn_opens(run):
    loader = shuffled(File(), num_workers=1, persistent_workers=True, worker_init_fn=open_file)
    return fit(run, net(), loader)


class ByProcess(IterableDataset):
    """Cuts itself over the loader's processes."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        rows = data()
        return iter([rows[i] for i in range(first, 22, step)])


@feature
def a_stream_cut_by_get_worker_info(run):
    return fit(run, net(), DataLoader(ByProcess(), batch_size=5, num_workers=2))


class OtherShards(IterableDataset):
    """`shard` with another signature than ours (that of Hugging Face's datasets): not a declaration of shards."""

    def __init__(self, index=0, num_shards=1):
        self.index, self.num_shards = index, num_shards

    def shard(self, num_shards, index, contiguous=True):
        return OtherShards(index, num_shards)

    def __iter__(self):
        rows = data()
        return iter([rows[i] for i in range(self.index, 22, self.num_shards)])


@feature
def a_stream_with_another_shard_method(run):
    return fit(run, net(), DataLoader(OtherShards(), batch_size=4))


@feature
def evaluate_keeps_the_modes_of_submodules(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(D)
    model[1].eval()
    model, opt, loader = run.prepare(model, sgd(model), shuffled(data()))
    for x, y in loader:
        learn(F.cross_entropy(model(x), y), opt)
        run.evaluate(model, straight(7), lambda m, b: {"loss": (m(b[0]).sum(), len(b[0]))})
        if isinstance(run, Plain):
            model[1].eval()  # its evaluate ends with model.train()
    return {**weights(model), "modes": torch.tensor([float(m.training) for m in model])}


# -- models and parameters -----------------------------------------------------------------------------------------


@feature
def a_gan_that_toggles_requires_grad(run):
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
            fake = make(noise)
            tell.requires_grad_(True)
            opt_tell.zero_grad()
            yes, no = tell(real), tell(fake.detach())
            (bce(yes, torch.ones_like(yes)) + bce(no, torch.zeros_like(no))).backward()
            opt_tell.step()
            tell.requires_grad_(False)
            opt_make.zero_grad()
            verdict = tell(fake)
            bce(verdict, torch.ones_like(verdict)).backward()
            opt_make.step()
    return weights(make, tell)


@feature
def a_layer_thawed_in_mid_iteration(run):
    model = net()
    model[0].requires_grad_(False)
    model, opt, loader = run.prepare(model, sgd(model), shuffled(data()))
    for i, (x, y) in enumerate(loader):
        if i == 2:
            model[0].requires_grad_(True)
        learn(F.cross_entropy(model(x), y), opt)
    return weights(model)


@feature
def add_param_group_with_a_new_module(run):
    model, opt, loader = ready(run)
    torch.manual_seed(11)
    head = nn.Linear(6, 4).to(D)
    opt.add_param_group({"params": head.parameters()})
    for _ in range(2):
        for x, y in loader:
            learn(F.cross_entropy(model(x) + head(x), y), opt)
    return weights(model, head)


@feature
def add_param_group_of_a_thawed_layer(run):
    model = net()
    model[0].requires_grad_(False)
    opt = torch.optim.SGD(model[2].parameters(), 0.1)
    sched = lr_scheduler.StepLR(opt, 1, 0.5)
    model, opt, loader, sched = run.prepare(model, opt, shuffled(data()), sched)
    for epoch in range(3):
        if epoch == 1:
            model[0].requires_grad_(True)
            opt.add_param_group({"params": model[0].parameters(), "lr": 0.01, "initial_lr": 0.01})
            sched.base_lrs.append(0.01)
        for x, y in loader:
            learn(F.cross_entropy(model(x), y), opt)
        sched.step()
    return weights(model)


@feature
def a_replaced_head_with_a_new_optimizer(run):
    model, opt, loader = ready(run)
    for epoch in range(2):
        if epoch == 1:
            torch.manual_seed(4)
            model[2] = nn.Linear(12, 4).to(D)
            opt = run.prepare(sgd(model))
        for x, y in loader:
            learn(F.cross_entropy(model(x), y), opt)
    return weights(model)


@feature
def a_replaced_head_in_the_old_group(run):
    model, opt, loader = ready(run)
    for epoch in range(2):
        if epoch == 1:
            torch.manual_seed(4)
            model[2] = nn.Linear(12, 4).to(D)
            opt.param_groups[0]["params"] = list(model.parameters())
        for x, y in loader:
            learn(F.cross_entropy(model(x), y), opt)
    return weights(model)


class Gated(nn.Module):
    """One linear layer for all samples, another for the chosen."""

    def __init__(self, size, bias=True):
        super().__init__()
        self.a, self.b = nn.Linear(size, 4, bias=bias), nn.Linear(size, 4, bias=bias)

    def forward(self, h, chosen):
        out = self.a(h)
        return torch.index_put(out, (chosen,), self.b(h[chosen])) if chosen.any() else out


@feature
def two_models_and_a_layer_used_sometimes(run):
    torch.manual_seed(0)
    encoder, head = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(D), Gated(6).to(D)
    opt = torch.optim.SGD([*encoder.parameters(), *head.parameters()], 0.1)
    encoder, head, opt, loader = run.prepare(encoder, head, opt, shuffled(data()))
    for _ in range(2):
        for x, y in loader:
            learn(F.cross_entropy(head(encoder(x), x[:, 0] > 0.8), y), opt)
    return weights(encoder, head)


def two_are_other():
    """Samples 6 and 7 of 21 are told apart by their first feature: in batches of 4, the second worker's part of 2."""
    rows = data(21)
    rows.tensors[0][:, 0] = 1.0
    rows.tensors[0][6:8, 0] = -1.0
    return DataLoader(rows, batch_size=4)


@feature
def two_experts_of_which_a_worker_uses_one(run):
    torch.manual_seed(0)
    a, b = nn.Linear(6, 4).to(D), nn.Linear(6, 4).to(D)
    opt = torch.optim.SGD([*a.parameters(), *b.parameters()], 0.1)
    a, b, opt, loader = run.prepare(a, b, opt, two_are_other())
    for x, y in loader:
        out, chosen = a(x), x[:, 0] > 0
        if chosen.any():
            out = torch.index_put(out, (chosen,), out[chosen] + b(x[chosen]))
        learn(F.cross_entropy(out, y), opt)
    return weights(a, b)


@feature
def an_encoder_and_a_head_that_is_late(run):
    """On one worker the head's bucket is held back by a layer without gradient, and the encoder's is not."""
    torch.manual_seed(0)
    encoder, head = nn.Linear(6, 5, bias=False).to(D), Gated(5, bias=False).to(D)
    opt = torch.optim.SGD([*encoder.parameters(), *head.parameters()], 0.1)
    encoder, head, opt, loader = run.prepare(encoder, head, opt, two_are_other())
    for x, y in loader:
        learn(F.cross_entropy(head(torch.tanh(encoder(x)), x[:, 0] > 0), y), opt)
    return weights(encoder, head)


@feature
def parameters_tied_across_two_models(run):
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).to(D)
    b = nn.Sequential(a[0], nn.ReLU(), nn.Linear(6, 4).to(D))
    params = {id(p): p for p in [*a.parameters(), *b.parameters()]}
    opt = torch.optim.Adam(params.values(), 0.01)
    a, b, opt, loader = run.prepare(a, b, opt, shuffled(data()))
    for x, y in loader:
        learn(F.cross_entropy(a(x), y) + F.cross_entropy(b(x), y), opt)
    return weights(a, b)


@feature
def weight_norm_and_spectral_norm(run):
    torch.manual_seed(0)
    model = nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 4)))
    return fit(run, model.to(D), shuffled(data()))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(1, 5, 2, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.body(x[..., None])[0][:, -1])


@feature
def an_lstm(run):
    torch.manual_seed(0)
    return fit(run, Recurrent().to(D), shuffled(data()))


@feature
def many_small_parameters(run):
    torch.manual_seed(0)
    rates = [nn.PReLU(6) for _ in range(200)]
    return fit(run, nn.Sequential(nn.Linear(6, 6), *rates, nn.Linear(6, 4)).to(D), shuffled(data()), epochs=1)


class Counting(nn.Module):
    """Puts a new tensor in its buffer's place in every forward."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.inner(x)


@feature
def a_buffer_that_is_replaced(run):
    return fit(run, Counting(), shuffled(data()))


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))
        self.b = nn.Parameter(torch.zeros(4, dtype=D))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.w).abs() + self.b


@feature
def complex_parameters(run):
    torch.manual_seed(0)
    out = fit(run, Waves(), shuffled(data()))
    return {k: torch.view_as_real(v) if v.is_complex() else v for k, v in out.items()}


@feature
def distillation_with_a_frozen_teacher(run):
    student, teacher = net(), net(4).requires_grad_(False)
    average = copy.deepcopy(student).requires_grad_(False)
    student, teacher, opt, loader = run.prepare(student, teacher, sgd(student), shuffled(data()))
    for x, y in loader:
        with torch.no_grad():
            target = teacher(x)
        out = student(x)
        learn(F.cross_entropy(out, y) + F.mse_loss(out, target), opt)
        torch._foreach_lerp_(list(average.parameters()), [p.detach() for p in student.parameters()], 0.1)
    return weights(student, teacher, average)


# -- gradients and steps -------------------------------------------------------------------------------------------


@feature
def sharpness_aware_minimization(run):
    model, opt, loader = ready(run)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [0.05 * p.grad for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        opt.step()
        opt.zero_grad()
    return weights(model)


@feature
def two_optimizers_on_one_model(run):
    """One for matrices and one for vectors, with gradients that the script replaced."""
    model = net()
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], 0.1)
    vectors = torch.optim.Adam([p for p in model.parameters() if p.ndim == 1], 0.01)
    model, matrices, vectors, loader = run.prepare(model, matrices, vectors, shuffled(data()))
    for _ in range(2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                p.grad = p.grad * 0.5
            for opt in (matrices, vectors):
                opt.step()
                opt.zero_grad()
    return weights(model)


@feature
def edited_gradients_stepped_on_twice(run):
    model, opt, loader = ready(run)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad = p.grad.clone().clamp(-0.01, 0.01)
        opt.step()
        opt.step()
        opt.zero_grad(set_to_none=False)
    return weights(model)


@feature
def values_written_through_data(run):
    """Past autograd's counters, as many scripts do: clamped, scaled, and replaced by other memory."""
    model, opt, loader = ready(run)
    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            learn(F.cross_entropy(model(x), y), opt)
            model[0].weight.data.clamp_(-0.2, 0.2)
            if i % 2:
                model[2].bias.data = model[2].bias.data * 0.9
            with torch.no_grad():
                model[2].weight.mul_(0.99)
    return weights(model)


@feature
def parameters_read_right_after_each_step(run):
    """By everybody who may: averages, copies, prints, state dicts, a vector of all of them."""
    model, opt, loader = ready(run)
    average, seen = torch.optim.swa_utils.AveragedModel(model), {}
    for x, y in loader:
        learn(F.cross_entropy(model(x), y), opt)
        readers = [
            lambda: model[0].weight.norm(),
            lambda: copy.deepcopy(model)[2].weight,
            lambda: nn.utils.parameters_to_vector(model.parameters()),
            lambda: model.state_dict()["2.bias"].clone(),
            lambda: functional_call(
                model, dict(model.named_parameters()), (torch.ones(1, model[0].in_features, dtype=D),)
            ),
        ]
        read = len(seen) % len(readers)  # another one in each step
        seen[f"step {len(seen)}"] = readers[read]().detach()
        average.update_parameters(model)
    found = {f"average {k}": v for k, v in average.module.state_dict().items()}
    return weights(model) | seen | found


@feature
def penalties_on_parametrised_weights(run):
    """The loss reads every parameter by itself, and some are computed from others."""
    model = net()
    model[0] = weight_norm(model[0])
    model, opt, loader = run.prepare(model, sgd(model), shuffled(data()))
    for x, y in loader:
        penalty = sum(p.square().sum() for p in model.parameters())
        learn(F.cross_entropy(model(x), y) + 1e-2 * penalty, opt)
    return weights(model)


@feature
def gradients_that_nobody_zeroes(run):
    """They outlive their step, clipped as they were; a second step uses them again."""
    model, opt, loader = ready(run, straight())
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        if i % 2:
            run.clip_grad_norm(model, 0.05)
        opt.step()
        if i == 1:
            opt.step()
        if i == 2:
            opt.zero_grad()
    return weights(model)


@feature
def gradients_by_autograd_grad(run):
    model, opt, loader = ready(run)
    params = list(model.parameters())
    for x, y in loader:
        for p, g in zip(params, torch.autograd.grad(F.cross_entropy(model(x), y), params), strict=True):
            p.grad = g
        opt.step()
        opt.zero_grad()
    return weights(model)


@feature
def gradients_by_functional_call(run):
    model, opt, loader = ready(run)

    def loss(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x,)), y)

    for x, y in loader:
        found = grad(loss)({k: p.detach() for k, p in model.named_parameters()}, x, y)
        for k, p in model.named_parameters():
            p.grad = found[k]
        opt.step()
        opt.zero_grad()
    return weights(model)


@feature
def several_losses_in_one_backward(run):
    model, opt, loader = ready(run)
    for x, y in loader:
        out = model(x)
        torch.autograd.backward([F.cross_entropy(out, y), (out**2).mean()])
        opt.step()
        opt.zero_grad()
    return weights(model)


@feature
def an_optimizer_over_a_part_with_clipping(run):
    """Nobody zeroes the first layer's gradients: they grow, and count in the norm."""
    model = net()
    model, opt, loader = run.prepare(model, torch.optim.Adam(model[2].parameters(), 0.01), shuffled(data()))
    norms = []
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        norms.append(model[0].weight.grad.norm())
    return {**weights(model), "norms": torch.stack(norms)}


@feature
def a_step_without_an_optimizer(run):
    model, loader = run.prepare(net(), shuffled(data()))
    for _ in range(2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
    return weights(model)


@feature
def a_worker_without_a_backward(run):
    """Parts without a sample to learn from have no backward, and still step; run.clip_grad_norm knows."""
    model, opt, loader = ready(run, straight())
    for x, y in loader:
        chosen = x[:, 0] > 0.2
        if chosen.any():
            (F.cross_entropy(model(x), y, reduction="none") * chosen).mean().backward()
        run.clip_grad_norm(model, 0.05)
        opt.step()
        opt.zero_grad()
    return weights(model)


@feature
def a_backward_that_raises_everywhere(run):
    """The whole batch is given up, on all workers, in the middle of its backward."""
    model, opt, loader = ready(run, straight())

    def out_of_memory(gradient):
        raise RuntimeError("out of memory")

    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        hook = model[0].weight.register_hook(out_of_memory) if i == 1 else None
        try:
            loss.backward()
        except RuntimeError:
            hook.remove()
            opt.zero_grad()
            continue
        opt.step()
        opt.zero_grad()
    return weights(model)


@feature
def a_scaler_that_skips_an_epochs_last_step(run):
    model = net()
    opt = sgd(model)
    sched = lr_scheduler.StepLR(opt, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, opt, loader, sched, scaler = run.prepare(model, opt, straight(20), sched, scaler)
    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * (float("inf") if i == 3 else 1)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        sched.step()
    return {**weights(model), "lr": torch.tensor(opt.param_groups[0]["lr"])}


# -- schedulers ----------------------------------------------------------------------------------------------------


def scheduled(run, make):
    model = net()
    opt = sgd(model)
    model, opt, loader, sched = run.prepare(model, opt, shuffled(data()), make(opt))
    rates = []
    for _ in range(2):
        for x, y in loader:
            learn(F.cross_entropy(model(x), y), opt)
            sched.step()
            rates.append(opt.param_groups[0]["lr"])
    return {**weights(model), "rates": torch.tensor(rates)}


@feature
def sequential_schedulers(run):
    def make(opt):
        parts = [lr_scheduler.ConstantLR(opt, 0.1, 3), lr_scheduler.ExponentialLR(opt, 0.9)]
        return lr_scheduler.SequentialLR(opt, parts, [3])

    return scheduled(run, make)


@feature
def one_cycle_scheduler(run):
    return scheduled(run, lambda opt: lr_scheduler.OneCycleLR(opt, 0.2, total_steps=30))


@feature
def lambda_scheduler(run):
    return scheduled(run, lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.95**step))


@feature
def a_scheduler_made_after_prepare(run):
    model, opt, loader = ready(run)
    sched = lr_scheduler.OneCycleLR(opt, 0.2, epochs=2, steps_per_epoch=len(loader))
    for _ in range(2):
        for x, y in loader:
            learn(F.cross_entropy(model(x), y), opt)
            sched.step()
    return weights(model)


@feature
def steps_without_a_loader(run):
    """Two loops over bare tensors with a checkpoint between: no loader says where a step ends."""
    x, y = data()[:]
    model = net()
    opt = sgd(model)
    sched = lr_scheduler.StepLR(opt, 3, 0.5)
    model, opt, sched = run.prepare(model, opt, sched)
    for steps in (5, 4):
        for i in range(steps):
            F.cross_entropy(model(x[i : i + 6]), y[i : i + 6]).backward()
            opt.step()
            sched.step()
            opt.zero_grad()
        run.log(loss=float(steps))
    return {**weights(model), "rate": torch.tensor(sched.get_last_lr())}


@feature
def scaled_steps_without_a_loader(run):
    x, y = data()[:]
    model = net()
    opt, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model, opt, scaler = run.prepare(model, opt, scaler)
    for i in range(9):
        loss = scaler.scale(F.cross_entropy(model(x[i : i + 6]), y[i : i + 6]))
        (loss * float("inf") if i == 4 else loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return {**weights(model), "scale": torch.tensor(scaler.get_scale())}


@feature
def two_optimizers_after_one_backward_without_a_loader(run):
    """Between the two steps the second one's gradient waits: no place to stop at."""
    x, y = data()[:]
    model = net()
    layers = list(model.children())
    opts = [sgd(layers[0]), torch.optim.Adam(layers[-1].parameters(), 0.02)]
    model, *opts = run.prepare(model, *opts)
    for i in range(7):
        F.cross_entropy(model(x[i : i + 6]), y[i : i + 6]).backward()
        for opt in opts:
            opt.step()
        for opt in opts:
            opt.zero_grad()
    return weights(model)

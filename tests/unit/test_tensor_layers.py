"""Split layers over threads: the same outputs and gradients as whole ones."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.comm.alone import AloneGroup
from echelon.comm.threads import Room
from echelon.errors import StrategyError, UsageError
from echelon.mesh.axes import laid
from echelon.parallel.tensor import form, meet
from echelon.parallel.tensor.layers import taken
from tests.equality import shared_zoo as zoo

D = torch.float64


def on_threads(size, work):
    """work(rank, group, group) on `size` threads; gives what each returned, raises what one raised."""
    rooms = [Room(size).groups() for _ in range(2)]
    found, raised = [None] * size, []

    def run(rank):
        try:
            found[rank] = work(rank, rooms[0][rank], rooms[1][rank])
        except BaseException as error:
            raised.append(error)
            for room in rooms:
                room[rank].abort(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return found


def refuse(outcome):
    raise AssertionError(outcome)


def split(model, group, everyone, **options):
    mine = copy.deepcopy(model)
    return mine, form.share(mine, group, everyone, refuse, **options)


def agrees(model, call, size, **options):
    """Is a model split over `size` threads as good as the whole one? call(model) -> output. Gives the ranks' Shared."""
    whole = copy.deepcopy(model)
    expected = call(whole)
    (expected * torch.linspace(-1, 2, expected.numel(), dtype=D).view(expected.shape)).sum().backward()

    def work(rank, group, everyone):
        mine, shared = split(model, group, everyone, **options)
        out = call(mine)
        (out * torch.linspace(-1, 2, out.numel(), dtype=D).view(out.shape)).sum().backward()
        return out.detach(), {n: p.grad for n, p in mine.named_parameters()}, mine, shared

    results = on_threads(size, work)
    for out, grads, mine, shared in results:
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
        for (name, param), other in zip(mine.named_parameters(), whole.parameters(), strict=True):
            piece = shared.pieces.of(param)
            right = taken(other.grad, piece) if piece and other.grad is not None else other.grad
            assert (grads[name] is None) == (right is None), name
            if right is not None:
                torch.testing.assert_close(grads[name], right, rtol=1e-11, atol=1e-12, msg=name)
    return [shared for *_, shared in results]


@pytest.mark.case("tensor: layers")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("how", ["column", "row"])
def test_any_linear_layer_may_be_split_by_itself(size, how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Softmax(-1), nn.Linear(7, 4)).to(D)
    x = torch.randn(3, 2, 5, dtype=D)
    shares = agrees(model, lambda m: m(x), size, overrides=f"*:{how}")
    assert len(shares[0].pieces.by_param) == (4 if how == "column" else 2)


@pytest.mark.case("tensor: layers")
@pytest.mark.parametrize("size", [2, 4])
def test_a_table_and_a_tied_output_layer_are_split_alike(size):
    torch.manual_seed(0)
    embed, head = nn.Embedding(11, 6, padding_idx=3), nn.Linear(6, 11, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, head).to(D)
    ids = torch.tensor([[0, 3, 10, 5], [3, 1, 10, 10]])
    shares = agrees(model, lambda m: m(ids), size, overrides="0:vocab")
    assert len(shares[0].pieces.by_param) == 1
    assert sum(s.here for s in shares) == 66


@pytest.mark.case("tensor: layers")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("case", ["plain", "causal", "padded", "mask a head", "averaged", "weights", "cross", "unbatched", "other sizes"])  # fmt: skip
def test_torchs_attention_by_heads(case, batch_first):
    torch.manual_seed(0)
    sizes = {"kdim": 5, "vdim": 7} if case == "other sizes" else {}
    model = nn.MultiheadAttention(8, 4, batch_first=batch_first, bias=case != "plain", **sizes).to(D)
    q = torch.randn(3, 5, 8, dtype=D)
    k, v = torch.randn(3, 6, sizes.get("kdim", 8), dtype=D), torch.randn(3, 6, sizes.get("vdim", 8), dtype=D)
    if case == "unbatched":
        q, k, v = q[0], k[0], v[0]
    elif not batch_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)

    def call(m):
        if case in ("cross", "unbatched", "other sizes"):
            return m(q, k, v, need_weights=False)[0]
        if case == "causal":
            return m(q, q, q, attn_mask=causal, is_causal=True, need_weights=False)[0]
        if case == "padded":
            mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 5 + [True]])
            return m(q, k, v, key_padding_mask=mask)[0]
        if case == "mask a head":
            mask = torch.randn(12, 5, 6, dtype=D, generator=torch.Generator().manual_seed(4))
            return m(q, k, v, attn_mask=mask, need_weights=False)[0]
        if case in ("averaged", "weights"):
            return m(q, k, v, average_attn_weights=case == "averaged")[1]
        return m(q, q, q)[0]

    agrees(model, call, 2)


@pytest.mark.case("tensor: layers")
def test_heads_that_do_not_divide_are_dealt_unevenly_if_that_is_allowed():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True).to(D)
    x = torch.randn(2, 4, 12, dtype=D)
    with pytest.raises(StrategyError, match=r"cannot split `self_attn` \(3 heads\)"):
        agrees(model, lambda m: m(x), 2)
    agrees(model, lambda m: m(x), 2, padding=True)
    whole = agrees(model, lambda m: m(x), 2, overrides="self_*:whole")
    assert whole[0].whole["self_attn"] == "asked for"


@pytest.mark.case("tensor: refusals")
def test_heads_of_keys_and_values_that_do_not_divide():
    torch.manual_seed(0)
    model = zoo.Attention(24, 6, 3).to(D)
    x = torch.randn(2, 4, 24, dtype=D)
    with pytest.raises(StrategyError, match=r"\(3 heads of keys and values\)"):
        agrees(model, lambda m: m(x), 2)
    shares = agrees(model, lambda m: m(x), 2, padding=True)
    assert sorted(s.here for s in shares)[0] < sorted(s.here for s in shares)[1]


class Block(nn.Module):
    """ResNet's: what is added at the end is whole."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Mixed(nn.Module):
    """Named like a pair, and not one: a softmax sees all features."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc2(self.fc1(x).softmax(-1))


class Packed(nn.Module):
    """Queries, keys and values in one layer, one head after the other (as BLOOM has them) or one kind after the other."""

    def __init__(self, by_head):
        super().__init__()
        self.num_heads, self.head_dim, self.by_head = 4, 2, by_head
        self.query_key_value, self.dense = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, hidden_states, attention_mask):
        x = self.query_key_value(hidden_states)
        if self.by_head:
            q, k, v = x.unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        else:
            q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)) for t in x.chunk(3, -1))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.dense(y.transpose(1, 2).flatten(2))


class Conv1D(nn.Module):
    """A linear layer as GPT-2's code has it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class GPT2(nn.Module):
    """Packed projections in Conv1D, and a width by which they are taken apart."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim, self.split_size = 4, 2, 8
        self.c_attn, self.c_proj = Conv1D(24, 8), Conv1D(8, 8)

    def forward(self, hidden_states, past_key_values=None):
        q, k, v = self.c_attn(hidden_states).split(self.split_size, dim=2)
        q, k, v = (t.view(*t.shape[:2], -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.c_proj(y.reshape(*y.shape[:2], -1).contiguous())


class Rotated(nn.Module):
    """As Llama and Qwen have it: heads counted from the tensors, a norm of each head, positions handed in."""

    def __init__(self):
        super().__init__()
        self.head_dim = 2
        self.q_proj, self.o_proj = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.k_proj, self.v_proj = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.q_norm = nn.RMSNorm(2)

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None):
        cos, sin = position_embeddings or (1.0, 0.0)
        q, k, v = (
            layer(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = self.q_norm(q) * cos + q.flip(-1) * sin
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size = 4, 2, 8
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (
            layer(x).view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return y.reshape(*x.shape[:-1], self.all_head_size)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, y, x):
        return self.norm(self.dense(y) + x)


class Bert(nn.Module):
    """Projections in a module, what is behind them in another."""

    def __init__(self):
        super().__init__()
        self.self, self.output = Inner(), Outer()

    def forward(self, hidden_states):
        return self.output(self.self(hidden_states), hidden_states)


@pytest.mark.case("tensor: proofs")
@pytest.mark.parametrize(
    ("model", "shape", "split_layers"),
    [(Block(), (2, 3, 5, 5), 3), (Mixed(), (2, 4), 0), (Packed(True), (2, 3, 8), 2), (Packed(False), (2, 3, 8), 2),
     (zoo.Gated(8, 12), (2, 8), 3), (zoo.CNN(), (2, 1, 5, 5), 0), (GPT2(), (2, 3, 8), 2), (Rotated(), (2, 3, 8), 4),
     (Bert(), (2, 3, 8), 4)],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else None,
)  # fmt: skip
def test_a_block_is_split_if_it_gives_the_same_answer(model, shape, split_layers):
    torch.manual_seed(0)
    x, model = torch.randn(shape, dtype=D), copy.deepcopy(model).to(D)
    call = (lambda m: m(x, None)) if isinstance(model, Packed) else (lambda m: m(x))
    shares = agrees(model, call, 2)
    assert sum(len(option.ways) for _, option in shares[0].chosen if option) == split_layers
    if not split_layers:
        assert "did not give the same answer" in "\n".join(shares[0].lines())


@pytest.mark.case("tensor: a weight used elsewhere")
def test_a_split_weight_that_other_code_uses_is_refused():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)

        def forward(self, ids):
            return F.linear(self.embed(ids), self.embed.weight)

    with pytest.raises(StrategyError) as told:
        agrees(Tied().to(D), lambda m: m(torch.tensor([1, 2])), 2, overrides="embed:vocab")
    assert "`embed.weight` is split" in str(told.value)
    assert "tensor_plan=embed:whole" in str(told.value)


def test_a_copy_of_a_split_model_is_split_as_well_and_pickling_one_is_refused():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(D), torch.randn(3, 4, dtype=D)

    def work(rank, group, everyone):
        mine, _ = split(model, group, everyone)
        with pytest.raises(UsageError, match=r"run\.save"):
            pickle.dumps(mine)
        mine(x)
        other = copy.deepcopy(mine)
        with torch.no_grad():
            other[0].weight.zero_()
            other[0].bias.zero_()
        return other(x), mine(x)

    for changed, same in on_threads(2, work):
        torch.testing.assert_close(changed, model[2].bias.expand(3, 4))
        torch.testing.assert_close(same, model(x))


def test_dropout_draws_one_mask_outside_of_a_block_and_one_a_worker_inside():
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
        model[2].weight.fill_(1.0)
        model[2].bias.zero_()
    lock, turn = (
        threading.Lock(),
        [0],
    )  # threads share torch's generator: what each would draw is drawn in turns
    kept = {}

    def work(rank, group, everyone):
        mine, _ = split(model, group, everyone)
        region = mine[0].forward.region
        with lock:
            torch.manual_seed(7)
            before = region.enter(torch.zeros(1, 4), True)
            inside = F.dropout(torch.ones(32), 0.5)
            region.leave(before)
            kept[rank] = inside, F.dropout(torch.ones(64), 0.5)
            region.enter(torch.zeros(1, 4), True)
            state = region._outside
            region.leave(before)
            assert torch.equal(torch.get_rng_state(), state), (
                "nothing was drawn inside: the stream is where it was"
            )
            turn[0] += 1

    on_threads(2, work)
    assert turn == [2]
    assert not torch.equal(kept[0][0], kept[1][0])
    assert torch.equal(kept[0][1], kept[1][1])


@pytest.mark.case("tensor: clipping")
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_torchs_clipping_sees_the_whole_models_norm(order):
    torch.manual_seed(0)
    model, x = zoo.Gated(8, 12).to(D), torch.randn(3, 8, dtype=D)
    whole = copy.deepcopy(model)
    whole(x).sum().backward()
    right = nn.utils.clip_grad_norm_(whole.parameters(), 0.1, norm_type=order)

    def work(rank, group, everyone):
        mine, shared = split(model, group, everyone)
        mine(x).sum().backward()
        norm = nn.utils.clip_grad_norm_(mine.parameters(), 0.1, norm_type=order)
        return norm, mine, shared

    for norm, mine, shared in on_threads(2, work):
        torch.testing.assert_close(norm, right)
        for param, other in zip(mine.parameters(), whole.parameters(), strict=True):
            piece = shared.pieces.of(param)
            torch.testing.assert_close(param.grad, taken(other.grad, piece) if piece else other.grad)


def test_where_every_element_lies_is_known():
    torch.manual_seed(0)
    model = zoo.Encoder().to(D)
    mesh = laid(4, 2, (1,), 2)
    covered = {}
    for rank, (mine, shared) in enumerate(on_threads(2, lambda r, g, e: split(model, g, e))):
        for name, param in mine.named_parameters():
            placed = form.placed(shared, mine.parameters(), mesh, rank)[id(param)]
            assert placed.numel == param.numel()
            assert placed.copies == ((0, 1, 2, 3) if shared.pieces.of(param) is None else (rank, rank + 2))
            whole = covered.setdefault(name, torch.zeros(placed.shape).view(-1))
            for run in placed.runs if placed.counts else ():
                for i in range(run.count):
                    whole[run.start + i * run.period :][: run.length] += 1
    assert all(bool((times == 1).all()) for times in covered.values())
    assert covered.keys() == dict(model.named_parameters()).keys()


def test_optimizer_state_of_before_is_cut_and_optimizers_that_need_all_are_refused():
    torch.manual_seed(0)
    model, x = zoo.Gated(8, 12).to(D), torch.randn(3, 8, dtype=D)
    opt = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    opt.step()
    before = [opt.state[p]["exp_avg"].clone() for p in model.parameters()]

    def work(rank, group, everyone):
        mine, optimizer = copy.deepcopy((model, opt))
        shared = form.share(mine, group, everyone, refuse)
        form.split_state(optimizer, shared.pieces, refuse)
        for param, whole in zip(mine.parameters(), before, strict=True):
            piece, state = shared.pieces.of(param), optimizer.state[param]
            torch.testing.assert_close(state["exp_avg"], taken(whole, piece) if piece else whole)
            assert state["step"].shape == ()
        with pytest.raises(StrategyError, match="a product over all parameters"):
            form.split_state(torch.optim.LBFGS(mine.parameters()), shared.pieces, refuse)

    on_threads(2, work)


def test_a_lost_peer_is_told_and_not_raised():
    groups, told = Room(2).groups(), []
    axis = meet.Axis(groups[0], told.append)
    groups[1].abort("gone")
    x = torch.ones(3, requires_grad=True)
    meet.copy(meet.add(x, axis), axis).sum().backward()
    assert [lost.reason for lost in told] == ["gone", "gone"]


def test_one_worker_has_a_model_that_nobody_touched():
    model = zoo.Gated(8, 12)
    shared = form.share(model, AloneGroup(torch.device("cpu")), AloneGroup(torch.device("cpu")), refuse)
    assert shared.pieces.by_param == {}
    assert not any("forward" in vars(m) for m in model.modules())
    assert form.placed(shared, model.parameters(), laid(1, 0, (1,), 1), 0) == {}


@pytest.mark.case("tensor: layers")
def test_checkpointed_blocks_with_dropout_leave_the_common_stream_alone():
    """Checkpointing runs a block again and stops in its middle: the next forward draws anew."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)).to(D)
    x = torch.randn(3, 4, dtype=D)
    states = {}

    def work(rank, group, everyone):
        mine, _ = split(model, group, everyone)
        region = mine[0].forward.region
        region.enter(x, True)  # and never left
        assert region._outside is not None
        mine.eval()
        mine(x)
        mine.train()
        region._fork(x)
        before = region._pass
        mine(x)
        states[rank] = before, region._pass, region._outside

    on_threads(2, work)
    for before, after, outside in states.values():
        assert after == before + 1
        assert outside is None

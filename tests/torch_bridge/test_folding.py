"""Equal layers in a row are computed as one loop, with the numbers that the unfolded program gives."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_bridge import torch_xla as xla
from torch_bridge.compiler.program import Program
from torch_bridge.config.settings import SETTINGS
from torch_bridge.mesh import stacked_arrays
from torch_bridge.passes import fold_repeats
from torch_bridge.recorder.dispatch import STATE
from torch_bridge.runtime import executor, session
from torch_bridge.torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

LAYERS, WIDTH = 5, 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """An input layer, equal blocks, an output layer."""

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = LAYERS, remat: bool = False):
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(layers)])
        self.last = nn.Linear(WIDTH, 3)
        self.remat = remat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.remat and self.training else block(x)
        return self.last(x)


def batch(i: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(i)).to("xla")


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, after: Callable[[int], None] = lambda i: None, start: int = 0
) -> list[torch.Tensor]:
    losses = []
    for i in range(start, start + steps):
        optimizer.zero_grad()
        loss = model(batch(i)).square().mean()
        loss.backward()
        optimizer.step()
        xla.sync()
        losses.append(loss.detach().cpu())
        after(i)
    return losses


def made(seed: int = 0, **given: object) -> Stack:
    torch.manual_seed(seed)
    xla.manual_seed(seed)
    return Stack(**given).to("xla")  # type: ignore[arg-type]


def values(model: nn.Module) -> list[torch.Tensor]:
    return [t.detach().cpu() for t in (*model.parameters(), *model.buffers())]


def loops(program: Program | None = None) -> list[fold_repeats.Loop]:
    """The loops of the program that ran last."""
    program = program or session.current().recent[-1]
    return [] if program.spec.plan is None else [x for x in program.spec.plan.items if isinstance(x, fold_repeats.Loop)]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch):
    executor.clear_cache()
    yield
    monkeypatch.undo()
    executor.clear_cache()


def both(monkeypatch: pytest.MonkeyPatch, script: Callable[[], list[torch.Tensor]], rtol: float = 1e-5) -> list[Program]:
    """Run the script folded and not; the numbers must agree but for the rounding of sums. Returns the programs of the folded run."""
    results = []
    for fold in ("0", "3"):
        monkeypatch.setenv("NXD_JAX_FOLD", fold)
        executor.clear_cache()
        results.append(script())
        programs = list(dict.fromkeys(session.current().recent))
        assert fold == "3" or not any(p.spec.plan for p in programs)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6)
    assert any(loops(p) for p in programs)
    return programs


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-3, amsgrad=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, eps=1e-3),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, eps=1e-3, foreach=False),
    "op by op": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3, foreach=True),
    "two groups": lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
        ],
        lr=0.01,
        eps=1e-3,
    ),
}


@pytest.mark.thorough(keep=3)
@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def script() -> list[torch.Tensor]:
        model = made()
        return [*train(model, OPTIMIZERS[name](model)), *values(model)]

    programs = both(monkeypatch, script)
    assert [loop.run.count for loop in loops(programs[-1])][:2] == [LAYERS, LAYERS]  # forward, and backward
    assert [loop.reverse for loop in loops(programs[-1])][:2] == [False, True]


def test_weights_stay_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step the weights of equal layers and their moments are rows of one array, which the next step takes over: no copy, one compilation."""
    monkeypatch.setenv("NXD_JAX_FOLD", "3")
    monkeypatch.setattr(SETTINGS, "speculate", 0)
    model = made()
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer)
    held = [block.up.weight._storage.held for block in model.blocks]
    assert {type(x) for x in held} == {stacked_arrays.Row}
    assert len({id(x.stack) for x in held}) == 1 and [x.index for x in held] == list(range(LAYERS))
    program = session.current().recent[-1]
    assert program.executions == 3
    assert len(program.spec.ports.inputs) < len(program.spec.inputs) - 3 * 5 * (LAYERS - 1) + 1
    before = held[0].stack.array
    held.clear()
    train(model, optimizer, steps=1)
    assert before.is_deleted()
    assert session.current().recent[-1] is program and program.executions == 4


@pytest.mark.thorough(keep=1)
@pytest.mark.switched_on("NXD_JAX_FUSED_OPTIMIZERS")
@pytest.mark.parametrize("clip", [True, False])
def test_zero_redundancy(clip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-1's step is a few ops however many parameters there are. The first layer's input needs no gradient, so its backward is no part of the loop, and
    yet all weights and parts that come in as one stack leave as one."""

    def script() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[Block() for _ in range(LAYERS)]).to("xla")
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, grad_clipping=clip, max_norm=0.01, lr=0.01, eps=1e-3)
        norms = []
        for i in range(3):
            optimizer.zero_grad()
            model(torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(i)).to("xla")).square().mean().backward()
            before = len(STATE.session.current.nodes)
            optimizer.step()
            ops = [node[0].op for node in STATE.session.current.nodes[before:]]
            assert i == 0 or len([op for op in ops if not op.is_view]) < 20, "for 25 parameters"
            norms.append(optimizer.grad_norm)
            xla.sync()
        return [*(n.cpu() for n in norms if n is not None), *values(model)]

    program = both(monkeypatch, script)[-1]
    plan = program.spec.plan
    assert plan is not None
    leaving = [members for _, members in plan.stacked]
    renewed = [[plan._updates[i] for i in places] for places in plan.stacked_inputs() if set(places) <= set(plan._updates)]
    assert len(renewed) == 20 and all(members in leaving for members in renewed)


def test_reading_and_writing_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def script() -> list[torch.Tensor]:
        model = made()
        optimizer = OPTIMIZERS["adamw"](model)
        found: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []

        def after(i: int) -> None:
            found.append(model.blocks[1].up.weight.detach().cpu())
            if i == 0:
                copies.append(model.blocks[2].up.weight.detach().clone())
            if i == 1:
                with torch.no_grad():
                    model.blocks[3].up.weight.mul_(0.5)
                    model.blocks[0].down.weight.copy_(torch.ones(WIDTH, 2 * WIDTH))
            if i == 2:
                model.blocks[4].norm.weight.data = torch.full((WIDTH,), 2.0, device="xla")
            if i == 3:
                state = torch.load(saved(model.state_dict()))
                model.load_state_dict(state)

        losses = train(model, optimizer, steps=6, after=after)
        return [*losses, *found, *values(model), copies[0].cpu()]

    both(monkeypatch, script)


def saved(what: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(what, buffer)
    buffer.seek(0)
    return buffer


def test_a_copy_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else holds a row (a detached clone, a deep copy) is not overwritten by the step that takes the stack over."""

    def script() -> list[torch.Tensor]:
        model = made()
        optimizer = OPTIMIZERS["sgd"](model)
        train(model, optimizer, steps=2)
        clones = [block.up.weight.detach().clone() for block in model.blocks[:2]]
        twin = copy.deepcopy(model)
        optimizer_of_twin = OPTIMIZERS["sgd"](twin)
        train(model, optimizer, steps=2, start=2)
        train(twin, optimizer_of_twin, steps=1, start=2)
        return [*values(model), *values(twin), *(c.cpu() for c in clones)]

    both(monkeypatch, script)


def test_a_copy_of_one_layer_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SETTINGS, "speculate", 0)
    monkeypatch.setenv("NXD_JAX_FOLD", "3")
    model = made()
    optimizer = OPTIMIZERS["sgd"](model)
    train(model, optimizer, steps=2)
    kept = model.blocks[1].up.weight.detach().clone()
    stack = model.blocks[1].up.weight._storage.held.stack.array
    train(model, optimizer, steps=1, start=2)
    assert stack.is_deleted() and not isinstance(kept._storage.held, stacked_arrays.Row)


def test_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer draws the numbers that it draws without folding."""

    def script() -> list[torch.Tensor]:
        model = made(block=lambda: Block(dropout=0.4))
        return [*train(model, OPTIMIZERS["adamw"](model)), *values(model)]

    both(monkeypatch, script)


def test_activation_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    def script() -> list[torch.Tensor]:
        model = made(block=lambda: Block(dropout=0.2), remat=True)
        return [*train(model, OPTIMIZERS["adamw"](model)), *values(model)]

    programs = both(monkeypatch, script)
    _, backward = loops(programs[-1])[:2]
    assert any("draw" in n.meta for n in backward.run.nodes[0])  # it draws the forward's numbers again


def test_one_layer_used_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared weights: their gradient is summed from iteration to iteration."""

    def script() -> list[torch.Tensor]:
        torch.manual_seed(1)
        shared = Block()
        model = made(block=lambda: shared)
        return [*train(model, OPTIMIZERS["sgd"](model)), *values(model)]

    both(monkeypatch, script)


def test_norms_after_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in BERT: between two layers' backward passes stands an op with several results, and the last layer's begins otherwise than the others'."""

    class After(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x + torch.tanh(self.linear(x)))

    def script() -> list[torch.Tensor]:
        model = made(block=After, layers=7)
        return [*train(model, OPTIMIZERS["adamw"](model)), *values(model)]

    programs = both(monkeypatch, script)
    forward, backward = loops(programs[-1])[:2]
    assert forward.run.count == 7 and backward.run.count >= 6 and backward.reverse


def test_layers_used_in_two_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of one loop that another part wants in an order that is not even are put together one by one."""

    class Twice(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for k in (1, 0, 3, 2, 4):
                x = self.blocks[k](x)
            x = torch.tanh(self.last(x)) @ self.first.weight[:, :3].t()
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    def script() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Twice().to("xla")
        optimizer = torch.optim.AdamW(reversed(list(model.parameters())), lr=0.01, eps=1e-3)
        return [*train(model, optimizer), *values(model)]

    both(monkeypatch, script)


def test_buffers_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.norm(self.linear(x)))

    def script() -> list[torch.Tensor]:
        model = made(block=Normed)
        losses = train(model, OPTIMIZERS["momentum"](model))
        model.eval()
        with torch.no_grad():
            return [*losses, model(batch(9)).cpu(), *values(model)]

    both(monkeypatch, script)


def test_gradient_accumulation_and_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    def script() -> list[torch.Tensor]:
        model = made()
        optimizer = OPTIMIZERS["adamw"](model)
        found = []
        for i in range(6):
            model(batch(i)).square().mean().backward()
            if i % 2:
                found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).cpu())
                optimizer.step()
                optimizer.zero_grad()
            xla.sync()
        return [*found, *values(model)]

    both(monkeypatch, script)


def test_gradients_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that the script still has leave the program stacked, and each can be read, or dropped."""

    def script() -> list[torch.Tensor]:
        model = made()
        model(batch(0)).square().mean().backward()
        xla.sync()
        found = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        model.blocks[2].up.weight.grad = None
        gc.collect()
        model(batch(1)).square().mean().backward()
        xla.sync()
        return found + [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    both(monkeypatch, script)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("odd", [0, 2, LAYERS - 1])
def test_an_odd_layer(odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of another kind among them: the others are folded as far as there are enough in a row."""

    def script() -> list[torch.Tensor]:
        made_so_far: list[int] = []

        def block() -> nn.Module:
            made_so_far.append(0)
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) if len(made_so_far) - 1 == odd + 1 else Block()

        model = made(block=block, layers=9)
        return [*train(model, OPTIMIZERS["adamw"](model)), *values(model)]

    both(monkeypatch, script)


def test_frozen_and_unfrozen_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def script() -> list[torch.Tensor]:
        model = made(layers=7)
        for block in model.blocks[:3]:
            block.requires_grad_(False)
        optimizer = OPTIMIZERS["adamw"](model)
        losses = train(model, optimizer)
        for block in model.blocks[:3]:
            block.requires_grad_(True)
        return [*losses, *train(model, optimizer, start=3), *values(model)]

    both(monkeypatch, script)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are cast in every iteration: no second stack of them is kept for the backward pass."""

    def script() -> list[torch.Tensor]:
        model = made()
        optimizer = OPTIMIZERS["adamw"](model)
        losses = []
        for i in range(3):
            with torch.autocast("xla", dtype=dtype):
                loss = model(batch(i)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            xla.sync()
            losses.append(loss.detach().cpu())
        return [*losses, *values(model)]

    programs = both(monkeypatch, script)
    forward = loops(programs[-1])[0]
    assert any(isinstance(series, fold_repeats.Recomputed) for series in forward.made.values())


def test_attention_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own transformer layers; the mask and the positions are shared by all of them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.position = nn.Parameter(torch.zeros(6, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.triu(torch.ones(6, 6, dtype=torch.bool, device=x.device), 1)
            return self.layers(torch.cat([x, x], -1) + self.position, mask=mask)

    def script() -> list[torch.Tensor]:
        torch.manual_seed(0)
        xla.manual_seed(0)
        model = Model().to("xla")
        return [*train(model, OPTIMIZERS["adamw"](model)), *values(model)]

    both(monkeypatch, script)


def test_every_layers_output_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of all layers, an auxiliary loss, and a value of one layer in the middle."""

    class Deep(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            hidden = []
            for block in self.blocks:
                x = block(x)
                hidden.append(x)
            return self.last(x) + torch.stack(hidden).mean() + hidden[2].amax() + hidden[1][0, 0]

    def script() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Deep().to("xla")
        return [*train(model, OPTIMIZERS["adamw"](model)), *values(model)]

    both(monkeypatch, script)


def test_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    def script() -> list[torch.Tensor]:
        model = made()
        x = batch(0).requires_grad_()
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        xla.sync()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    both(monkeypatch, script)


def test_a_failed_run_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NXD_JAX_FOLD", "3")
    model = made()
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, steps=2)
    before = values(model)

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patched:
        patched.setattr(Program, "run", fail)
        with pytest.raises(RuntimeError, match="no"):
            train(model, optimizer, steps=1, start=2)
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    train(model, optimizer, steps=1, start=2)


def test_evaluation_and_training_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that fold the same layers pass the stacks on to each other."""

    def script() -> list[torch.Tensor]:
        model = made()
        optimizer = OPTIMIZERS["adamw"](model)
        found = []
        for i in range(3):
            found += train(model, optimizer, steps=1, start=i)
            with torch.no_grad():
                found.append(model(batch(10 + i)).cpu())
        return [*found, *values(model)]

    both(monkeypatch, script)
    stacks: list[object] = []
    stacked = stacked_arrays._put_together
    monkeypatch.setattr(stacked_arrays, "_put_together", lambda arrays: stacks.append(arrays) or stacked(arrays))
    executor.clear_cache()
    script()
    assert len(stacks) == 5 * 3  # five weights a layer and their moments, once


def test_few_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NXD_JAX_FOLD", raising=False)
    model = made()
    train(model, OPTIMIZERS["adamw"](model), steps=1)
    assert session.current().recent[-1].spec.plan is None
    assert not any(isinstance(p._storage.held, stacked_arrays.Row) for p in model.parameters())

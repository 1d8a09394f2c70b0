"""What strangers' trainings do: each a small program, rebuilt after public bug reports."""

from __future__ import annotations

import copy
import io
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.nn.functional import all_gather
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call, grad, vmap
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.client.beside_stock.tuned_run import WIDTH, Run, batch

BLOCKS = 2


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout))
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)
        found: torch.Tensor = self.head(values)
        return found

    def training_step(self, values: torch.Tensor) -> torch.Tensor:
        return self(values).square().mean() + self.head.bias.abs().sum()


def loss_of(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(values) - values.roll(1)).square().mean()
    return loss


def descend(run: Run, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """As most trainings do."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    run.losses.append(loss.detach())


def simply(run: Run, model: nn.Module) -> None:
    optimizer = run.sgd(model)
    for values in run.batches():
        descend(run, optimizer, loss_of(model, values))


# Optimizers of several passes


def lbfgs(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = run.optimizer(torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3))
    for values in run.batches():

        def closure(values: torch.Tensor = values) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, values)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        run.losses.append(optimizer.step(closure).detach())  # type: ignore[attr-defined]


def gradient_penalty(run: Run) -> None:
    model, optimizer = run.descending(Net())
    for values in run.batches():
        values.requires_grad_()
        found = model(values)
        (slope,) = torch.autograd.grad(found.sum(), values, create_graph=True)
        descend(run, optimizer, found.square().mean() + (slope.norm() - 1).square())


def backward_that_can_be_differentiated(run: Run) -> None:
    model, optimizer = run.descending(Net())
    for values in run.batches():
        optimizer.zero_grad()
        loss = loss_of(model, values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The cycles go with zero_grad().
            loss.backward(create_graph=True)  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.detach())


def cached_gradients(run: Run) -> None:
    """GradCache: a batch's loss by parts that would not fit together."""
    model, optimizer = run.descending(Net())
    for values in run.batches():
        optimizer.zero_grad()
        parts = values.chunk(2)
        with torch.no_grad():
            found = torch.cat([model(part) for part in parts])
        found.requires_grad_()
        loss = (found @ found.T).logsumexp(1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        assert found.grad is not None
        kept = found.grad.chunk(2)
        with run.without_sync(model):
            (model(parts[0]) * kept[0]).sum().backward()
        (model(parts[1]) * kept[1]).sum().backward()
        optimizer.step()
        run.losses.append(loss.detach())


def several_optimizers(run: Run) -> None:
    """One of them steps seldom."""
    module = Net()
    model = run.wrap(module)
    often = run.optimizer(torch.optim.Adam(module.blocks.parameters(), 0.01))
    seldom = run.optimizer(torch.optim.SGD(module.head.parameters(), 0.05))
    for values in run.batches():
        descend(run, often, loss_of(model, values))
        if run.step % 3 == 2:
            seldom.step()
            seldom.zero_grad()


def accumulation(run: Run) -> None:
    """With all that many trainings have: clipping, AdamW, a schedule, gradients that stay."""
    model = run.wrap(Net(dropout=0.1))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), 0.01))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for values in run.batches():
        with run.without_sync(model):
            loss_of(model, batch()).backward()  # type: ignore[no-untyped-call]
        loss = loss_of(model, values)
        loss.backward()  # type: ignore[no-untyped-call]
        run.losses.append(_local(clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=run.step % 2 == 0)
        run.losses.append(loss.detach())


def _local(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


def sharded_optimizer(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    run.optimizer(optimizer.optim if hasattr(optimizer, "optim") else optimizer)
    for values in run.batches():
        descend(run, optimizer, loss_of(model, values))


# Modes of the whole process


@contextmanager
def _restored(set_to: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


def deterministic_and_with_anomalies_shown(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        is_set = torch.use_deterministic_algorithms
        with _restored(is_set, True, False), torch.autograd.detect_anomaly():
            simply(run, run.wrap(Net()))


def other_defaults(run: Run) -> None:
    """Of numbers, and of where what names no device is made, as in scripts for a GPU."""
    other = torch.float64 if run.is_sharded else torch.bfloat16
    with _restored(torch.set_default_dtype, other, torch.float32):
        model = run.wrap(Net())
        with _restored(torch.set_default_device, "meta", None):
            simply(run, model)


def autocast_and_scaler(run: Run) -> None:
    """Each fourth step has gradients that are no numbers, and is left out."""
    model, optimizer = run.descending(Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for values in run.batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, values)
        factor = math.inf if run.step % 4 == 3 else 1.0
        scaler.scale(loss * factor).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        run.losses += [loss.detach(), torch.tensor(scaler.get_scale())]


def grad_mode_turned_round(run: Run) -> None:
    """Gradients are off but where the model trains, and inference mode is between."""
    model, optimizer = run.descending(Net())
    with torch.no_grad():
        for values in run.batches():
            with torch.enable_grad():
                descend(run, optimizer, loss_of(model, values))
            model.eval()
            with torch.inference_mode():
                run.losses.append(loss_of(model, values).clone())
            run.losses.append(loss_of(model, values))
            model.train()


# Where weights come from, and go


def meta_weights(run: Run) -> None:
    with torch.device("meta"):
        model = run.wrap(Net())
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for each in model.modules():
        if isinstance(each, nn.Linear):
            each.reset_parameters()
    simply(run, model)


def parametrized(run: Run) -> None:
    """Weights that are computed from others, with buffers that forward changes."""
    model = Net()
    spectral_norm(model.blocks[1][0])  # type: ignore[index]
    weight_norm(model.head)
    simply(run, run.wrap(model))


def averaged_copies(run: Run) -> None:
    """EMA of the module that is wrapped; and a copy of the wrapper itself, in mid-training."""
    model = run.wrap(Net())
    average = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = run.sgd(model)
    for values in run.batches():
        descend(run, optimizer, loss_of(model, values))
        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(now.detach(), 0.1)
        if run.step % 5 == 4:
            twin = copy.deepcopy(model)
            loss = loss_of(twin, values)
            loss.backward()  # type: ignore[no-untyped-call]
            run.losses.append(loss.detach())
    run.losses += [each.detach() for each in average.parameters()]


def saved_and_loaded(run: Run) -> None:
    """Each rank keeps its part in memory, and goes back to it some steps later."""
    model = run.wrap(Net())
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), 0.01))
    kept = io.BytesIO()
    for values in run.batches():
        if run.step % 7 == 2:
            kept = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], kept)
        if run.step % 7 == 5:
            kept.seek(0)
            weights, state = torch.load(kept, weights_only=False)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        descend(run, optimizer, loss_of(model, values))


def replaced_storage(run: Run) -> None:
    """Of weights and of gradients."""
    model = run.wrap(Net(), gradient_as_bucket_view=True)
    optimizer = run.sgd(model)
    for values in run.batches():
        optimizer.zero_grad()
        loss = loss_of(model, values)
        loss.backward()  # type: ignore[no-untyped-call]
        for each in model.parameters():
            each.grad = each.grad.clone()
        optimizer.step()
        for each in model.parameters():
            each.data = each.data.clone()
        run.losses.append(loss.detach())


def wrapped_again(run: Run) -> None:
    """When more of it is to be trained."""
    module = Net()
    module.blocks.requires_grad_(False)
    model = run.wrap(module)
    optimizer = run.sgd(module)
    for values in run.batches():
        if run.step == 8:
            module.blocks.requires_grad_(True)
            model = run.wrap(module)
        descend(run, optimizer, loss_of(model, values))


# Threads


def other_thread(run: Run) -> None:
    """The whole training is in one."""
    failures: list[BaseException] = []

    def train() -> None:
        try:
            simply(run, run.wrap(Net()))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


# A step of one's own


def own_method(run: Run) -> None:
    """A training step that is no forward pass, and a loss that is made by the model."""
    model, optimizer = run.descending(Net())
    if run.is_sharded:
        register_fsdp_forward_method(model, "training_step")
        for values in run.batches():
            descend(run, optimizer, model.training_step(values))
        return
    forward = model.module.forward

    def redirected(values: torch.Tensor) -> torch.Tensor:
        model.module.forward = forward
        found: torch.Tensor = model.module.training_step(values)
        return found

    for values in run.batches():
        model.module.forward = redirected
        descend(run, optimizer, model(values))


def functional(run: Run) -> None:
    """An inner step with weights of its own, and gradients of each row, beside a plain pass."""
    model = run.wrap(Net())
    module, optimizer = model.module, run.sgd(model)

    def of_row(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = functional_call(module, weights, (row,))
        return found.square().mean()

    for values in run.batches():
        weights = {name: each.detach() for name, each in module.named_parameters()}
        slopes = vmap(grad(of_row), (None, 0))(weights, values)
        moved = {name: each - 0.1 * slopes[name].mean(0) for name, each in weights.items()}
        with torch.no_grad():
            target = functional_call(module, moved, (values,))
        descend(run, optimizer, (model(values) - target).square().mean())


def two_models(run: Run) -> None:
    """A generator and its critic, with an optimizer each; the critic is frozen meanwhile."""
    generator, critic = run.wrap(Net()), run.wrap(Net())
    makes, judges = run.sgd(generator), run.sgd(critic)
    for values in run.batches():
        made = generator(values)
        descend(run, judges, (critic(made.detach()) - critic(batch())).mean().tanh())
        critic.requires_grad_(False)
        descend(run, makes, critic(made).mean().tanh())
        critic.requires_grad_(True)


def inside_another(run: Run) -> None:
    """A part is wrapped by itself, and the whole leaves its weights out."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = run.wrap(Net())
            self.outer = Net()

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.outer(self.inner(values))
            return found

    whole = Whole()
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        whole, [name for name, _ in whole.named_parameters() if name.startswith("inner")]
    )
    model = run.wrap(whole)
    simply(run, model)


def changed_flags(run: Run) -> None:
    """Blocks are frozen for some steps; dropout is on in others."""
    module = Net(dropout=0.2)
    model = run.wrap(module, find_unused_parameters=True)
    optimizer = run.sgd(model)
    for values in run.batches():
        model.train(run.step % 3 != 0)
        module.blocks[run.step % 2].requires_grad_(run.step % 5 < 3)
        descend(run, optimizer, loss_of(model, values))


def compiled_step(run: Run) -> None:
    """The training's whole step, and not the model."""
    model, optimizer = run.descending(Net())

    @torch.compile(backend="eager")
    def step(values: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, values)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    for values in run.batches():
        optimizer.zero_grad()
        run.losses.append(step(values))
        optimizer.step()


def own_collectives(run: Run) -> None:
    """Embeddings of all ranks in the loss; a metric that is under way during the backward pass."""
    model, optimizer = run.descending(Net())
    for values in run.batches():
        found = model(values)
        others = torch.cat(all_gather(found))  # type: ignore[no-untyped-call]
        loss = (found @ others.T).logsumexp(1).mean()
        metric = loss.detach().clone()
        work = dist.all_reduce(metric, async_op=True)
        descend(run, optimizer, loss)
        assert work is not None
        work.wait()
        run.losses.append(metric)


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def own_hooks(run: Run) -> None:
    """On weights, gradients and modules; what they do to a gradient comes before it is reduced."""
    model = run.wrap(Net())
    seen: list[torch.Tensor] = []
    for each in model.parameters():
        each.register_hook(lambda slope: slope.clamp(-0.1, 0.1))
        each.register_post_accumulate_grad_hook(_halve)
    model.register_full_backward_hook(lambda _, __, slopes: seen.append(slopes[0].detach()))
    model.register_forward_hook(lambda _, __, found: found * 1.5)
    optimizer = run.sgd(model)
    optimizer.register_step_post_hook(lambda *_: seen.append(torch.ones(1)))
    for values in run.batches():
        descend(run, optimizer, loss_of(model, values))
    run.losses += seen


def step_tried_again(run: Run) -> None:
    """A forward pass that breaks on all ranks; gradients that one of them makes no use of."""
    model, optimizer = run.descending(module := Net())

    def breaks(*_: Any) -> None:
        raise MemoryError

    for values in run.batches():
        if run.step % 4 == 1:
            handle = module.blocks[1].register_forward_hook(breaks)
            try:
                model(values)
            except MemoryError:
                handle.remove()
        loss = loss_of(model, values)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if run.step % 5 != 3:
            optimizer.step()
        run.losses.append(loss.detach())


# Ways to shard


def one_shard(run: Run) -> None:
    """HSDP in which each copy is whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copies", "parts"))
    module = Net()
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    simply(run, run.tuned(fully_shard(module, mesh=mesh)))

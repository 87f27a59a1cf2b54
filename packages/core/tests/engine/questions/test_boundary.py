"""What goes into a unit and comes out of it, and how often, does not change the gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.distributed.fsdp import register_fsdp_forward_method as register_with_torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import fully_shard, register_fsdp_forward_method

from .. import boundary_models as models
from ..helpers import (
    assert_bit_equal,
    assert_gradients_like_plain,
    averaged_gradients,
    full_gradients,
    full_parameters,
    shard_units,
)
from ..models import MLP, inputs_of, make
from .asking import Answers, Case, Cases, Outcomes, answer, named, sampled


def my_inputs(step: int = 0) -> Tensor:
    return inputs_of(step, dist.get_rank())


def units_of(model: nn.Module) -> Iterable[nn.Module]:
    return model.units


def square_loss(model: nn.Module) -> Tensor:
    return model(my_inputs()).square().mean()


def check_model(model_class: type[nn.Module], *args: object) -> None:
    """As the plain model, with the root kept gathered and with everything released."""
    for options in ({}, {"reshard_after_forward": True}):
        assert_gradients_like_plain(
            lambda: make(model_class, *args), units_of, square_loss, **options
        )


def several_forwards(model: nn.Module) -> Tensor:
    return model(my_inputs(0)).square().mean() + model(my_inputs(1)).square().mean()


def forward_of_a_part(model: nn.Module) -> Tensor:
    """The middle unit alone contributes once more, after the root's forward."""
    return model(my_inputs(0)).mean() + model.layers[1](my_inputs(1)).square().mean()


def forward_that_is_not_used(model: nn.Module) -> Tensor:
    model(my_inputs(1))
    return model(my_inputs(0)).mean()


def layers_of(model: nn.Module) -> Iterable[nn.Module]:
    return model.layers


def check_mlp(run: Callable[[nn.Module], Tensor]) -> None:
    assert_gradients_like_plain(lambda: make(MLP), layers_of, run)


def check_two_backwards() -> None:
    """Two losses of one forward, the graph kept between."""
    ours, plain = make(MLP), make(MLP)
    shard_units(ours, ours.layers)
    for model in (ours, plain):
        loss = model(my_inputs()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    expected = averaged_gradients(plain)
    # Two equal numbers: (a + a) + (b + b), halved, is (a + b) / 2 twice.
    assert_bit_equal(full_gradients(ours), expected)


def check_input_gradients() -> None:
    ours, plain = make(MLP), make(MLP)
    shard_units(ours, ours.layers)
    gradients = []
    for model in (ours, plain):
        x = my_inputs().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().mean(), [x])
        gradients.append(gradient)
        model(x).square().mean().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[1], gradients[3])


class OnTheFirstRank(models.Backwards):
    """On the others it returns its input: none of its modules runs there."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if dist.get_rank() == 0 else x


class InsideOnTheFirstRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OnTheFirstRank()

    @property
    def units(self) -> Iterable[nn.Module]:
        return [*self.inner.units, self.inner]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def check_input_that_is_the_output(model_class: type[nn.Module]) -> None:
    """The backward of a rank that has run nothing does what that of the others does."""
    ours, plain = make(model_class), make(model_class)
    shard_units(ours, units_of(ours), reshard_after_forward=True)
    for step in range(3):
        for model in (ours, plain):
            model.zero_grad()
            x = my_inputs(step).requires_grad_()
            model(x).square().mean().backward()
            assert x.grad is not None
        assert_bit_equal(full_gradients(ours), averaged_gradients(plain))


def check_evaluation_between_steps(mode: Callable[[], Any]) -> None:
    ours, plain = make(MLP), make(MLP)
    shard_units(ours, ours.layers)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, plain)]
    for step in range(3):
        ours.eval()
        with mode():
            assert torch.equal(ours(my_inputs(step)), plain(my_inputs(step)))
        ours.train()
        for model in (ours, plain):
            model.zero_grad()
            model(my_inputs(step)).square().mean().backward()
        assert_bit_equal(full_gradients(ours), averaged_gradients(plain))
        for name, parameter in plain.named_parameters():
            parameter.grad = averaged_gradients(plain)[name]
        for optimizer in optimizers:
            optimizer.step()
    assert_bit_equal(full_parameters(ours), full_parameters(plain))


class Checkpointed(nn.Module):
    """Recomputes its units in backward, from inside the unit or around it."""

    def __init__(self, inside: bool, use_reentrant: bool) -> None:
        super().__init__()
        self.inside = inside
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(5, 5)
        self.units = nn.ModuleList([CheckpointedUnit(inside, use_reentrant) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)  # reentrant checkpoints need an input that requires a gradient
        for unit in self.units:
            x = unit(x) if self.inside else checkpoint(unit, x, use_reentrant=self.use_reentrant)
        return x


class CheckpointedUnit(nn.Module):
    def __init__(self, inside: bool, use_reentrant: bool) -> None:
        super().__init__()
        self.inside = inside
        self.use_reentrant = use_reentrant
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant) if self.inside else layer(x)
            x = torch.tanh(x)
        return x


class SeveralCheckpointed(nn.Module):
    """Of what a reentrant checkpoint runs, nothing is in the graph of the outputs."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.units, self.keeps = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)]), keeps

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        first = checkpoint(self.units[0], x, use_reentrant=True)
        y = checkpoint(self.units[1], first, use_reentrant=True)
        return {"y": y, "first": first} if self.keeps else {"y": y + first, "x": x}


def check_several_checkpointed(keeps: bool, is_root: bool) -> None:
    ours, plain = make(SeveralCheckpointed, keeps), make(SeveralCheckpointed, keeps)
    shard_units(ours, [] if is_root else ours.units)
    for step in range(3):
        for model in (ours, plain):
            model.zero_grad()
            out = model(my_inputs(step).requires_grad_())
            sum(each.square().mean() for each in out.values()).backward()
        assert_bit_equal(full_gradients(ours), averaged_gradients(plain))


class HandsOn(nn.Module):
    """Returns its input beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), x


class Hands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([HandsOn(), HandsOn()])
        self.head = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x, before = unit(x)
            x = x + before
        return self.head(x)


def check_gathers_of_a_backward() -> None:
    """What a unit hands on is of the unit before: its node is no beginning of the backward."""
    model = make(Hands)
    shard_units(model, units_of(model))
    for step in range(3):
        loss = model(my_inputs(step).requires_grad_()).square().mean()
        with CommDebugMode() as comms:
            loss.backward()
    gathers = [n for name, n in comms.get_comm_counts().items() if "gather" in str(name)]
    assert sum(gathers) == 1, comms.get_comm_counts()  # small units are gathered together


class Remembers(nn.Module):
    """Puts what it makes into the list that it was given, writes to its input, and returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, made: list[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
        before = x.clone()
        made.append(torch.tanh(self.a(before)))
        y = torch.tanh(self.b(before))
        x += torch.tanh(self.a(before))
        return y, made, x


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Remembers(), Remembers()])

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        made: list[Tensor] = []
        y = x = x.clone()
        for unit in self.units:
            y, made, x = unit(x, made)
        return y, made, x


def check_what_was_put_into_inputs(which: int) -> None:
    """A backward through that alone."""
    ours, plain = make(Remembering), make(Remembering)
    shard_units(ours, units_of(ours), reshard_after_forward=True)
    for step in range(3):
        for model in (ours, plain):
            model.zero_grad()
            out = model(my_inputs(step))[which]
            (sum(out) if isinstance(out, list) else out).square().mean().backward()
        ours_, plain_ = full_gradients(ours), averaged_gradients(plain)
        torch.testing.assert_close(ours_, plain_)


class FrozenAround(nn.Module):
    """Its first and its last module are one unit, which nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(5, 5) for _ in range(3))
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def check_gathers_of_frozen_modules() -> None:
    model = make(FrozenAround)
    fully_shard([model.first, model.last], reshard_after_forward=True)
    fully_shard(model)
    for step in range(3):
        loss = model(my_inputs(step).requires_grad_()).square().mean()
        with CommDebugMode() as comms:
            loss.backward()
        gathers = [n for name, n in comms.get_comm_counts().items() if "gather" in str(name)]
        assert sum(gathers) == 1, comms.get_comm_counts()


class WithMethod(MLP):
    """Has a second entry beside ``forward``, which calls ``forward`` in turn."""

    def training_step(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self(x).square().mean()}

    def last_layer(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layers[2].weight).sum()


def check_forward_method() -> None:
    ours, plain = make(WithMethod), make(WithMethod)
    register_fsdp_forward_method(plain, "training_step")  # does nothing without fully_shard
    shard_units(ours, ours.layers)
    register_fsdp_forward_method(ours, "training_step")
    for _ in range(2):
        for model in (ours, plain):
            model.zero_grad()
            model.training_step(my_inputs())["loss"].backward()
        assert_bit_equal(full_gradients(ours), averaged_gradients(plain))


def check_method_without_forward(register: Callable[[nn.Module, str], None]) -> None:
    ours, plain = make(WithMethod), make(WithMethod)
    fully_shard(ours)
    register(ours, "last_layer")
    for model in (ours, plain):
        model.last_layer(my_inputs()).backward()
    assert_bit_equal(full_gradients(ours), averaged_gradients(plain))


# Whether a backward comes back is known from the outputs


class FrozenEnds(nn.Module):
    """As a language model with LoRA: the root's own parameters are frozen, the blocks are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        logits: Tensor = self.head(x)
        return logits


def gradients_around_another_forward(
    model: nn.Module, other: Callable[[nn.Module], object]
) -> list[Tensor]:
    loss = model(torch.tensor([[1, 2, 3]])).sum()
    with torch.no_grad():
        other(model)
    loss.backward()
    found = [p.grad for p in model.parameters() if p.requires_grad]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]


def forward_of_the_root(model: nn.Module) -> None:
    model(torch.tensor([[3, 2]]))


def forward_of_a_block(model: nn.Module) -> None:
    model.blocks[0](torch.ones(2, 4))  # type: ignore[index]


def two_forwards(model: nn.Module) -> None:
    forward_of_the_root(model)
    model.eval()
    forward_of_the_root(model)
    model.train()


def check_frozen_ends(reshard: bool | None, other: Callable[[nn.Module], object]) -> None:
    torch.manual_seed(0)
    model = FrozenEnds()
    expected = gradients_around_another_forward(copy.deepcopy(model), other)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    for _ in range(3):
        found = gradients_around_another_forward(model, other)
        model.zero_grad()
        torch.testing.assert_close(found, expected)


class Backbone(nn.Module):
    """As of transformers: feature maps are what a hook of the blocks keeps."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.units = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        self.maps: list[Tensor] = []
        for unit in self.units:
            unit.register_forward_hook(lambda module, args, out: self.maps.append(out))
            if recomputes:
                recompute(unit)

    def forward(self, x: Tensor) -> Tensor:
        self.maps.clear()
        for unit in self.units:
            x = unit(x)
        return torch.stack(self.maps).square().sum(0) + 0 * x


def check_kept_outputs(recomputes: bool, after: bool) -> None:
    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return Backbone(recomputes=recomputes)

    for reshard in (None, True, False):
        model, plain = make_model(), make_model()
        for unit in model.units:
            fully_shard(unit, reshard_after_forward=reshard)
            if after:
                recompute(unit)
        fully_shard(model, reshard_after_forward=reshard)
        for step in range(2):
            x = torch.ones(2, 4) * (1 + step)
            for each in (model, plain):
                each.zero_grad()
                each(x).sum().backward()
            expected = {name: param.grad for name, param in plain.named_parameters()}
            for name, gradient in full_gradients(model).items():
                torch.testing.assert_close(gradient, expected[name], msg=name)


class Extended(nn.Module):
    """Hooks that were there before compute with parameters, and extend what is returned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.units = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.kept: list[Tensor] = []

        def extend(module: nn.Linear, args: Any, out: Any) -> Any:
            self.kept.append(out)
            return out @ module.weight.T + module.bias

        def fill(module: nn.Linear, args: Any, out: Any) -> None:
            if kind == "in place":
                out.mul_(1 + module.bias.square())

        for unit in self.units:
            unit.register_forward_hook(extend if kind == "new" else fill)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        for unit in self.units:
            x = torch.tanh(unit(x))
        return x + sum(each.sum() for each in self.kept)


def asked(name: str, ask: Callable[..., None], *choices: Iterable[Any]) -> Cases:
    """A case for each combination of arguments."""
    return {
        ", ".join([name, *map(said, args)]): Case(lambda args=args: ask(*args))
        for args in product(*choices)
    }


def said(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def cases() -> Cases:
    flags = (False, True)
    found = sampled(5, asked("output", check_model, [models.OutputModel], models.OUTPUTS))
    found |= asked("one of two", check_model, [models.OnlyExtra], ["dict", "dataclass", "tuple"])
    kinds = [
        models.CalledTwice,
        models.CalledAgainAtTheEnd,
        models.Skipping,
        models.Backwards,
        models.InPlaceOnOutput,
        models.InPlaceOnView,
        models.InPlaceOnTuple,
        models.Keywords,
        models.PassThrough,
        models.NoGradientInside,
        models.EmbeddingFirst,
        models.NestedUnits,
    ]
    found |= sampled(6, asked("model", check_model, kinds))
    runs = [several_forwards, forward_of_a_part, forward_that_is_not_used]
    found |= asked("not in pairs", check_mlp, runs)
    found |= asked("two backwards", check_two_backwards)
    found |= asked("gradients of inputs", check_input_gradients)
    found |= asked(
        "returns its input", check_input_that_is_the_output, [OnTheFirstRank, InsideOnTheFirstRank]
    )
    # Also before the first step: Lightning checks the validation loop first.
    modes = [torch.no_grad, torch.inference_mode]
    found |= asked("evaluation between steps", check_evaluation_between_steps, modes)
    found |= asked("checkpointed", check_model, [Checkpointed], flags, flags)
    found |= asked("several reentrant outputs", check_several_checkpointed, flags, flags)
    found |= asked("hands on its input", check_gathers_of_a_backward)
    found |= asked("put into inputs", check_what_was_put_into_inputs, (0, 1, 2))
    found |= asked("frozen modules are gathered once", check_gathers_of_frozen_modules)
    found |= asked("method", check_forward_method)
    registers = {"ours": register_fsdp_forward_method, "torch": register_with_torch}
    for name, register in registers.items():
        found |= asked(
            f"method is the only entry, {name}", check_method_without_forward, [register]
        )
    others = [forward_of_the_root, forward_of_a_block, two_forwards]
    found |= asked("frozen root", check_frozen_ends, (None, True, False), others)
    for recomputes, after in ((False, False), (True, False), (False, True)):
        found |= asked("kept by a hook", check_kept_outputs, [recomputes], [after])
    return found | asked("hooks compute", check_model, [Extended], ["new", "in place"])


CASES = cases()


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.parametrize("name", named(CASES))
def test_gradients_are_those_of_the_plain_model(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)

"""What training scripts of others do between and within steps: hooks, copies, second graphs.

The methods of `Habits` are events (``event_...``, before a step) and passes (``pass_...``, in place
of a forward and a backward). A player of plain models and one of sharded models both have them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from vescale_fsdp.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

if TYPE_CHECKING:
    from .runner import _Player as Player
else:
    Player = object

EVENTS = ("hook", "prehook", "backward_hook", "scale")  # on a module
EVENTS += ("ema", "dcp", "reload_optimizer", "new_optimizer", "to", "data", "swap", "foreach")
PASSES = ("grad", "only_input", "inputs", "functional", "around", "reentrant", "on_cpu")
PASSES += ("parameters", "gradients", "penalty", "curvature")
CLIPS = ("inf", "one", "value", "by hand")
LEAVES = ("Recurrent", "Attention", "Normed", "Listed")  # modules with ways of their own


class Habits(Player):
    """A part of the player."""

    averaged: AveragedModel | None = None
    calls: Any = None  # in place of the model, in a pass

    # Events

    def event_hook(self, path: str) -> None:
        """A forward hook changes the output."""

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: 1.5 * tensor, output)

        self.model.get_submodule(path).register_forward_hook(hook)

    def event_prehook(self, path: str) -> None:
        """A hook changes the input."""

        def hook(module: nn.Module, args: Any) -> Any:
            return tree_map_only(Tensor, lambda tensor: tensor + 0.25, args)

        self.model.get_submodule(path).register_forward_pre_hook(hook)

    def event_backward_hook(self, path: str) -> None:
        """A hook sees the gradients of the outputs, and changes those of the inputs."""

        def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            for number, each in enumerate(outputs):
                if each is not None:
                    key = f"{path}, output {number}"
                    self.hooked[key] = self.hooked.get(key, 0) + each.double().sum()
            return tree_map_only(Tensor, lambda tensor: 0.5 * tensor, inputs)

        self.model.get_submodule(path).register_full_backward_hook(hook)

    def event_scale(self, path: str) -> None:
        """Gradients that reach an output are scaled, of each output in another way."""
        # Of an output that is cast, or an input that is returned as it is, the caller has another
        # tensor than forward, as with FSDP2: a hook on it sees less.
        casts = self.space["CASTS_OUTPUTS"]

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            inputs = {each.data_ptr() for each in tree_leaves(args) if isinstance(each, Tensor)}
            for number, each in enumerate([] if casts else tree_leaves(output)):
                is_input = isinstance(each, Tensor) and each.data_ptr() in inputs
                if isinstance(each, Tensor) and each.requires_grad and not is_input:
                    factor = 0.5 + number
                    each.register_hook(lambda g, by=factor: None if g is None else by * g)

        self.model.get_submodule(path).register_forward_hook(hook)

    def event_ema(self, _: str) -> None:
        """An average of the weights, and a forward with it."""
        self.reshard_all()  # for a copy, and to add sharded ones to sharded ones
        if self.averaged is None:
            self.averaged = AveragedModel(self.model)
        self.averaged.update_parameters(self.model)
        self.event_eval("no_grad", self.averaged.module)

    def event_dcp(self, _: str) -> None:
        """The whole state, changed, goes back."""
        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(self.model, options=options)
        for name, value in state.items():
            self.write(f"whole state: {name}", value)
        changed = {name: 0.9 * value for name, value in state.items()}
        set_model_state_dict(self.model, changed, options=options)

    def event_reload_optimizer(self, _: str) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def event_new_optimizer(self, _: str) -> None:
        """For the parameters that are trainable now."""
        self.optimizer.zero_grad()
        self.optimizer = self.made_optimizer([p for p in self.named.values() if p.requires_grad])

    def event_to(self, _: str) -> None:
        self.model.to(self.device).requires_grad_(True)

    def event_data(self, _: str) -> None:
        """Weights change past autograd, which counts no version."""
        for param in self.named.values():
            param.data.mul_(0.9)

    def event_swap(self, _: str) -> None:
        """Other weights for a forward, and the former ones after it."""
        kept = [param.detach().clone() for param in self.named.values()]
        for param in self.named.values():
            param.data.copy_(0.5 * param.data)
        self.event_eval("no_grad")
        for param, value in zip(self.named.values(), kept, strict=True):
            param.data.copy_(value)

    def event_foreach(self, _: str) -> None:
        """As the step of an optimizer of one's own."""
        params = [param.detach() for param in self.named.values()]
        torch._foreach_mul_(params, 0.9)
        torch._foreach_add_(params, torch._foreach_sign(params), alpha=0.01)

    # Passes

    def wanted_loss(self, rank: int, which: int = 0) -> Tensor:
        """A loss whose input gets a gradient."""
        kept, self.input_is_wanted = self.input_is_wanted, True
        try:
            return self.loss(rank, which)
        finally:
            self.input_is_wanted = kept

    def pass_grad(self, rank: int) -> None:
        """The gradient of the input alone, before the backward."""
        loss = self.wanted_loss(rank)
        (gradient,) = torch.autograd.grad(loss, self.x, retain_graph=True)
        self.write("gradient of the input alone", gradient, rank)
        loss.backward()

    def pass_only_input(self, rank: int) -> None:
        """A graph for the gradient of the input alone, and another one."""
        loss = self.wanted_loss(rank, 1)
        (gradient,) = torch.autograd.grad(loss, self.x)
        self.write("gradient of the input alone", gradient, rank)
        self.loss(rank).backward()

    def pass_inputs(self, rank: int) -> None:
        """A backward that is told where to go, before the whole one."""
        loss = self.wanted_loss(rank)
        loss.backward(inputs=[self.x], retain_graph=True)
        self.write("gradient of the input alone", self.x.grad, rank)
        loss.backward()

    def trainable(self) -> list[nn.Parameter]:
        return [param for param in self.named.values() if param.requires_grad]

    def pass_parameters(self, rank: int) -> None:
        """A backward that is told which parameters to train."""
        # Of no use where a rank's graph has none of them (docs/coming-from-fsdp2.md).
        shows = self.space["SHOWS_PARAMETERS"]
        self.loss(rank).backward(inputs=self.trainable() if shows else None)

    def pass_gradients(self, rank: int) -> None:
        """Gradients that are looked at, before the backward."""
        loss = self.loss(rank)
        if self.space["SHOWS_PARAMETERS"]:
            torch.autograd.grad(loss, self.trainable(), retain_graph=True, allow_unused=True)
        loss.backward()

    def pass_penalty(self, rank: int) -> None:
        """The loss has the gradient of the input in it."""
        loss = self.wanted_loss(rank)
        (slope,) = torch.autograd.grad(loss, self.x, create_graph=True)
        self.write("gradient of the input alone", slope, rank)
        (loss + slope.square().mean()).backward()

    def pass_curvature(self, rank: int) -> None:
        """The loss has a second derivative by the input in it, and another forward is between."""
        (slope,) = torch.autograd.grad(self.wanted_loss(rank), self.x, create_graph=True)
        if not slope.requires_grad:  # nothing in the model is curved
            return
        (curve,) = torch.autograd.grad(slope.sum(), self.x, create_graph=True, allow_unused=True)
        if curve is not None and curve.requires_grad:
            (self.loss(rank, 1) + curve.square().mean()).backward()

    def pass_functional(self, rank: int) -> None:
        """With other values in place of the parameters."""
        self.calls = lambda x: functional_call(
            self.model, {name: 0.5 * param for name, param in self.named.items()}, x
        )
        self._pass_of_calls(rank)

    def pass_around(self, rank: int) -> None:
        """All of the model in an activation checkpoint."""
        self.calls = lambda x: checkpoint(self.model, x, use_reentrant=False)
        self._pass_of_calls(rank)

    def pass_reentrant(self, rank: int) -> None:
        """All of the model in an activation checkpoint of the old kind."""
        self.calls = lambda x: checkpoint(self.model, x, use_reentrant=True)
        self._pass_of_calls(rank)

    def _pass_of_calls(self, rank: int) -> None:
        try:
            self.wanted_loss(rank).backward()
        finally:
            self.calls = None

    def pass_on_cpu(self, rank: int) -> None:
        """What is saved for the backward waits on the host."""
        with torch.autograd.graph.save_on_cpu():
            loss = self.loss(rank)
        loss.backward()

    # Clipping

    def clip_inf(self) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.named.values(), 0.05, float("inf"))

    def clip_one(self) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.named.values(), 0.5, 1.0, foreach=True)

    def clip_value(self) -> Tensor:
        torch.nn.utils.clip_grad_value_(self.named.values(), 0.05)
        return self.norm_by_hand()

    def clip_by_hand(self) -> Tensor:
        norm = self.norm_by_hand()
        for param in self.named.values():
            if param.grad is not None:
                param.grad.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))
        return norm

    def norm_by_hand(self) -> Tensor:
        grads = [param.grad for param in self.named.values() if param.grad is not None]
        squares = [self.whole((each**2).sum()).double() for each in grads]
        return sum(squares, start=torch.zeros((), dtype=torch.float64)).sqrt()

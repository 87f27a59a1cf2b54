"""split_named_params: hidden matrices on one side, all else on the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vescale_fsdp import fully_shard
from vescale_fsdp.optim import split_named_params
from vescale_fsdp.testing import run_ranks

from ..engine.models import MLP, TinyGPT, make


def names(model: nn.Module) -> tuple[list[str], list[str]]:
    hidden, rest = split_named_params(model)
    assert {id(p) for _, p in hidden + rest} == {id(p) for p in model.parameters()}
    assert len(hidden + rest) == len(list(model.parameters()))
    return [name for name, _ in hidden], [name for name, _ in rest]


class Experts(nn.Module):
    """A stack of matrices as one parameter, with a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.stack = nn.Parameter(torch.randn(4, 8, 16))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.output = nn.Linear(8, 8)  # no head: it is in a block
        self.experts = Experts()


class Model(nn.Module):
    """Untied; as many positions as the model is wide."""

    def __init__(self, head: nn.Module | None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 8)
        self.positions = nn.Embedding(8, 8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.patches = nn.Conv2d(3, 8, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        if head is not None:
            self.to_words = head


def test_matrices_and_stacks_of_blocks_are_hidden() -> None:
    hidden, rest = names(Model(nn.Linear(8, 50)))
    in_block = ["attention.in_proj_weight", "attention.out_proj.weight", "output.weight"]
    in_block += ["experts.stack", "experts.router.weight"]
    assert sorted(hidden) == sorted(f"layers.{i}.{name}" for i in range(2) for name in in_block)
    # One row per word: a head, whatever it is called.
    assert "to_words.weight" in rest


def test_a_tied_head_is_an_embedding() -> None:
    hidden, rest = names(make(TinyGPT))
    inner = ["qkv.weight", "out.weight", "up.weight", "down.weight"]
    assert hidden == [f"blocks.{i}.{name}" for i in range(2) for name in inner]
    assert rest[:2] == ["position", "embedding.weight"]


def test_without_a_head_the_matrices_of_the_last_block_stay_hidden() -> None:
    hidden, _ = names(Model(None))
    assert "layers.1.output.weight" in hidden
    assert "layers.1.experts.router.weight" in hidden


def test_the_last_layer_of_a_plain_stack_is_its_head() -> None:
    hidden, rest = names(MLP(3))
    assert hidden == ["layers.0.weight", "layers.1.weight"]
    assert "layers.2.weight" in rest


def test_names_say_what_is_a_head_or_an_embedding() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
            self.ensemble = nn.Linear(8, 8)  # no word begins with emb
            self.classifier = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    hidden, _ = names(Net())
    assert hidden == ["ensemble.weight"]


def test_the_caller_has_the_last_word() -> None:
    def is_hidden(name: str, param: Tensor) -> bool | None:
        return {"layers.0.weight": False, "layers.2.weight": True}.get(name)

    hidden, _ = split_named_params(MLP(3), is_hidden=is_hidden)
    assert [name for name, _ in hidden] == ["layers.1.weight", "layers.2.weight"]


def check_sharded() -> None:
    for build in (lambda: make(TinyGPT), lambda: Model(nn.Linear(8, 50)), lambda: Model(None)):
        model = build()
        expected = names(model)
        units = model.blocks if isinstance(model, TinyGPT) else model.layers
        for unit in units:
            fully_shard(unit)
        fully_shard(model)
        assert names(model) == expected


def test_the_split_is_the_same_after_sharding() -> None:
    run_ranks(check_sharded, 1)

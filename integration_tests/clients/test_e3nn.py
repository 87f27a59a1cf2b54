"""Forces of molecules by e3nn, as MACE and NequIP compute them: a backward inside of the forward.

The loss contains the forces, so that it is a gradient of a gradient. Parts of e3nn are scripted.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import in_double

NUM_ATOMS, BATCH = 4, 4
FEATURES = "4x0e + 4x1o"


class Interaction(nn.Module):
    """Messages along edges, weighted by a network of their lengths."""

    def __init__(self, given: str) -> None:
        super().__init__()
        from e3nn import o3
        from e3nn.nn import FullyConnectedNet

        self.tensor_product = o3.FullyConnectedTensorProduct(
            given, "0e + 1o", FEATURES, shared_weights=False
        )
        self.weights = FullyConnectedNet([1, 8, self.tensor_product.weight_numel], torch.tanh)
        self.linear = o3.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, edges: Tensor, along: Tensor, lengths: Tensor) -> Tensor:
        messages = self.tensor_product(x[edges[0]], along, self.weights(lengths))
        summed = torch.zeros(len(x), messages.shape[1], dtype=x.dtype)
        return self.linear(summed.index_add(0, edges[1], messages))  # type: ignore[no-any-return]


class Potential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from e3nn import o3

        self.embedding = nn.Embedding(2, 4)
        self.interactions = nn.ModuleList([Interaction("4x0e"), Interaction(FEATURES)])
        self.readout = o3.Linear(FEATURES, "0e")

    def forward(self, kinds: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """The energies of molecules, [molecules], and forces, [atoms, 3]."""
        from e3nn import o3

        place.requires_grad_()
        molecule = torch.arange(len(place)) // NUM_ATOMS
        pairs = torch.combinations(torch.arange(len(place)))
        pairs = torch.cat([pairs, pairs.flip(1)])
        edges = pairs[molecule[pairs[:, 0]] == molecule[pairs[:, 1]]].t()
        vectors = place[edges[1]] - place[edges[0]]
        along = o3.spherical_harmonics("0e + 1o", vectors, normalize=True)
        x = self.embedding(kinds)
        for interaction in self.interactions:
            x = interaction(x, edges, along, vectors.norm(dim=1, keepdim=True))
        parts = self.readout(x)[:, 0].tanh()
        energies = parts.new_zeros(len(place) // NUM_ATOMS).index_add(0, molecule, parts)
        (slope,) = torch.autograd.grad(energies.sum(), place, create_graph=self.training)
        return energies, -slope


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    kinds = torch.randint(2, (BATCH * NUM_ATOMS,), generator=generator)
    return kinds, torch.randn(len(kinds), 3, generator=generator)


def train(model: nn.Module, rank: int, size: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, amsgrad=True)
    for step in range(3):
        kinds, place = (each.chunk(size)[rank] for each in batch(step))
        energies, forces = model(kinds, place)
        (energies.square().mean() + 10 * (forces - place.sin().detach()).square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10)
        optimizer.step()
        optimizer.zero_grad()


@in_double()
def beside_one_process() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Potential())
    plain, sharded = models
    for interaction in sharded.interactions:
        fully_shard(interaction)
    fully_shard(sharded)
    train(plain, 0, 1)
    train(sharded, dist.get_rank(), 2)
    for name, param in sharded.named_parameters():
        expected = plain.get_parameter(name).data
        torch.testing.assert_close(param.full_tensor(), expected, msg=name)  # type: ignore[attr-defined]
    expected, forces = (model.eval()(*batch(9))[1] for model in models)
    assert not forces.requires_grad
    torch.testing.assert_close(forces, expected)


def test_forces_train_as_on_one_process() -> None:
    run_ranks(beside_one_process, 2)

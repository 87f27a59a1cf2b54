"""Objects of ``register_for_checkpointing`` that hold sharded tensors, such as averages of weights.

Accelerate pickles the state of such an object in the first process, and every process loads that
file. So `as_whole` gathers sharded tensors before a save, and shards full ones at a load, as those
that the object has then. Other objects are saved and loaded by Accelerate as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map_with_path

from vescale_fsdp import CheckpointMismatchError
from vescale_fsdp.checkpoint import full

__all__ = ["as_whole", "refuse_sharded"]


@contextmanager
def as_whole(accelerator: Any) -> Iterator[None]:
    """A context in which the registered objects have full tensors in their states."""
    config, objects = accelerator.project_configuration, accelerator._custom_objects
    keeps = accelerator.is_main_process
    keeps |= config.save_on_each_node and accelerator.is_local_main_process
    accelerator._custom_objects = [_Whole(each, keeps) for each in objects]
    try:
        yield
    finally:
        accelerator._custom_objects = objects


class _Whole:
    """The state of a registered object, with full tensors.

    Args:
        held: the object.
        keeps: whether this process writes it.
    """

    def __init__(self, held: Any, keeps: bool) -> None:
        self._held, self._keeps = held, keeps

    def state_dict(self) -> Any:
        """The object's state. Collective if it has sharded tensors: one all-gather for each."""
        state = self._held.state_dict()
        return full.gathered(state, keep=self._keeps) if _has_sharded(state) else state

    def load_state_dict(self, state: Any) -> None:
        """Give the object its state. No communication.

        Raises:
            CheckpointMismatchError: a tensor has another shape than the object's, or the file has
                one process's part of it.
        """
        own = self._held.state_dict()
        if _has_sharded(own):
            targets = {keystr(path): leaf for path, leaf in tree_leaves_with_path(own)}
            state = tree_map_with_path(lambda path, leaf: _part(keystr(path), leaf, targets), state)
        self._held.load_state_dict(state)


def _part(name: str, value: Any, targets: dict[str, Any]) -> Any:
    target = targets.get(name)
    if not isinstance(target, DTensor):
        return value
    if isinstance(value, DTensor):
        raise CheckpointMismatchError(
            f"{name} of a registered object was saved as one process's part of a sharded tensor; "
            "the other parts are in no file. Make the object anew, from the weights of the model"
        )
    return full.part_of(value, target, name)


def _has_sharded(tree: Any) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in tree_leaves(tree))


def refuse_sharded(tree: Any) -> None:
    """Raise if one process's file would have one process's part of a tensor.

    Raises:
        TypeError: a tensor is sharded.
    """
    for leaf in tree_leaves(tree):
        if isinstance(leaf, DTensor) and not all(p.is_replicate() for p in leaf.placements):
            raise TypeError(
                f"save got a sharded tensor ({type(leaf).__name__} of shape {tuple(leaf.shape)}), "
                "and would write this process's part of it. Save accelerator.get_state_dict(model),"
                " which all processes must call; or use accelerator.save_model or save_state"
            )

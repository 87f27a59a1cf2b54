"""What the first backward of a model shows: parameters that it did not train, or not together.

Two mistakes raise no error by themselves, and are seen here, once, when the backward has ended::

    self.all = [self.w]; fully_shard(model)     the list keeps the former parameter: forward may
                                                compute with it, and no optimizer has it
    for block in blocks: fully_shard(block)     each block is a root, so what is around them (an
                                                embedding, a head) belongs to no unit

A slot has a weak reference to the parameter that it has replaced. Later backwards cost nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from vescale_fsdp import compat
from vescale_fsdp.engine.slot import Slot, listed
from vescale_fsdp.engine.unit import Unit, units_in
from vescale_fsdp.errors import warn_user


def check_replaced(slots: Iterable[Slot]) -> None:
    """Look for parameters from before ``fully_shard`` that other code still holds.

    Warns if there are several. A single one may be the variable of a loop that has ended.

    Raises:
        RuntimeError: a gradient has reached one, so a forward has computed with it.
    """
    held = [(slot, param) for slot in slots if (param := slot.replaced()) is not None]
    used = [slot.fqn for slot, param in held if slot.has_reached(param)]
    if used:
        raise RuntimeError(
            f"forward has computed with parameters that fully_shard has replaced: {listed(used)}. "
            "A list, a closure or an attribute has kept the former ones. Their gradients are not "
            "reduced, and train nothing. Look parameters up in their modules when forward runs "
            "(`self.weight`), or make the list after fully_shard"
        )
    # One that is frozen, before or after, is not trained on purpose.
    wanted = [(s, param) for s, param in held if param.requires_grad and s.sharded.requires_grad]
    idle = [(slot, param) for slot, param in wanted if not slot.is_followed]
    if len(idle) > 1:
        num_bytes = sum(compat.local_tensor(p).nbytes for _, p in idle if not p.is_meta)
        warn_user(
            f"{len(idle)} parameters that fully_shard has replaced are still held: "
            f"{listed([slot.fqn for slot, _ in idle])}. An optimizer, a list or a closure (also "
            "that of a hook) that was made before fully_shard holds them. They are not trained, "
            f"and keep {num_bytes:,} bytes of memory on this rank. Make it after fully_shard, of "
            "model.parameters(), or delete it"
        )


class _Root(NamedTuple):
    unit: weakref.ref[Unit]
    cls: type[nn.Module] | None
    takes_gradients: bool  # whether an input of its forward wants a gradient


_task = -1  # the number of the backward that is the first one of these roots
_roots: list[_Root] = []


def note_root(root: Unit) -> None:
    """Note the root of a model when its first backward begins."""
    global _task
    task = compat.current_backward()
    if task != _task:
        _task = task
        _roots.clear()
    takes_gradients = any(call.takes_gradients for call in root.open_calls)
    _roots.append(_Root(weakref.ref(root), root.module_class, takes_gradients))


def warn_of_several_roots(root: Unit) -> None:
    """Warn, when the last one ends, if a backward has reached several trained roots of one class.

    They may be the blocks of a model that is no unit itself. Models may be of one class too: two
    critics, or two towers. These begin with data, so that no input wants a gradient.
    """
    noted = [each for each in _roots if each.cls is root.module_class]
    units = [unit for each in noted if (unit := each.unit()) is not None and _may_be_a_block(unit)]
    if not units or units[-1] is not root:
        return
    if len(units) > 1 and any(each.takes_gradients for each in noted):
        numbers = ", ".join(f"model {unit.engine.number}" for unit in units if unit.engine)
        warn_user(
            f"one backward has reached {len(units)} outermost units of the class {root.kind}: "
            f"{numbers}. If they are parts of one model, its trainable parameters outside of them "
            "(embeddings, norms, a head) are in no unit: their gradients are not reduced, and each "
            "rank trains its own. Call fully_shard on the whole model last; or pass these "
            "parameters in ignored_params, if you reduce their gradients yourself. If they are "
            "models of their own, nothing is wrong: "
            'warnings.filterwarnings("ignore", "one backward has reached")'
        )


def _may_be_a_block(root: Unit) -> bool:
    """Whether a root is trained, and nothing says that other code reduces gradients around it."""
    units = [unit for module in root.modules() for unit in units_in(module).values()]
    if not any(unit.trainable for unit in units) or any(unit.has_ignored for unit in units):
        return False
    return not any(compat.is_ignored_by_ddp(s.sharded) for unit in units for s in unit.slots())

"""What the first backward of a model shows: parameters that it did not train, or not together.

Two mistakes raise no error by themselves, and are seen here, once, when the backward has ended::

    self.all = [self.w]; fully_shard(model)     the list keeps the former parameter: forward may
                                                compute with it, and no optimizer has it
    for block in blocks: fully_shard(block)     each block is a root, so what is around them (an
                                                embedding, a head) belongs to no unit

An FSDPParam has a weak reference to the parameter that it has replaced. Later backwards cost
nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

from vescale_fsdp import compat
from vescale_fsdp.engine.fsdp_param import FSDPParam, listed
from vescale_fsdp.engine.unit import Unit, units_in
from vescale_fsdp.errors import warn_user


def check_replaced(fsdp_params: Iterable[FSDPParam]) -> None:
    """Look for parameters from before ``fully_shard`` that other code still holds.

    Warns if there are several. A single one may be the variable of a loop that has ended.

    Raises:
        RuntimeError: a gradient has reached one, so a forward has computed with it.
    """
    held = [
        (fsdp_param, param)
        for fsdp_param in fsdp_params
        if (param := fsdp_param.replaced()) is not None
    ]
    used = [fsdp_param.fqn for fsdp_param, param in held if fsdp_param.has_reached(param)]
    if used:
        raise RuntimeError(
            f"forward has computed with parameters that fully_shard has replaced: {listed(used)}. "
            "A list, a closure or an attribute has kept the former ones. Their gradients are not "
            "reduced, and train nothing. Look parameters up in their modules when forward runs "
            "(`self.weight`), or make the list after fully_shard"
        )
    # One that is frozen, before or after, is not trained on purpose.
    wanted = [(s, param) for s, param in held if param.requires_grad and s.sharded.requires_grad]
    idle = [(fsdp_param, param) for fsdp_param, param in wanted if not fsdp_param.is_followed]
    if len(idle) > 1:
        num_bytes = sum(compat.local_tensor(p).nbytes for _, p in idle if not p.is_meta)
        warn_user(
            f"{len(idle)} parameters that fully_shard has replaced are still held: "
            f"{listed([fsdp_param.fqn for fsdp_param, _ in idle])}. An optimizer, a list or a "
            "closure (also that of a hook) that was made before fully_shard holds them. They are "
            f"not trained, and keep {num_bytes:,} bytes of memory on this rank. Make it after "
            "fully_shard, of model.parameters(), or delete it"
        )


_task = -1  # the number of the backward that is the first one of these roots
_roots: list[weakref.ref[Unit]] = []


def note_root(root: Unit) -> None:
    """Note the root of a model when its first backward begins, or its forward within a backward.

    In a reentrant checkpoint each block runs again within the backward of the loss, and then has a
    backward of its own. The former is what all blocks have in common.
    """
    global _task
    task = compat.current_backward()
    if task != _task:
        _task = task
        _roots.clear()
        # Last of all: a warning that is an error must keep no model from the end of its backward.
        last = partial(compat.queue_backward_callback, _warn_of_several_roots)
        compat.queue_backward_callback(last)
    if all(each() is not root for each in _roots):
        _roots.append(weakref.ref(root))


def _warn_of_several_roots() -> None:
    """Warn, when a backward ends, if it has reached several trained roots of one class.

    They may be the blocks of a model that is no unit itself, or models of one class: two towers, or
    two critics. From here both look alike.
    """
    units = [unit for ref in _roots if (unit := ref()) is not None and _may_be_a_block(unit)]
    _roots.clear()
    for cls in dict.fromkeys(unit.module_class for unit in units):
        alike = [unit for unit in units if unit.module_class is cls]
        if len(alike) == 1:
            continue
        numbers = ", ".join(f"model {unit.engine.number}" for unit in alike if unit.engine)
        warn_user(
            f"one backward has reached {len(alike)} outermost units of the class {alike[0].kind}: "
            f"{numbers}. If they are parts of one model, its trainable parameters outside of them "
            "(embeddings, norms, a head) are in no unit: their gradients are not reduced, and each "
            "rank trains its own. Call fully_shard on the whole model last; or pass these "
            "parameters in ignored_params, if you reduce their gradients yourself. If they are "
            "models of their own, nothing is wrong: "
            'warnings.filterwarnings("ignore", "one backward has reached")'
        )


def _may_be_a_block(root: Unit) -> bool:
    """Whether a root is trained, and nothing says that all around it is reduced, too."""
    units = [unit for module in root.modules() for unit in units_in(module).values()]
    if not any(unit.trainable for unit in units):
        return False
    if any(unit.has_ignored or unit.is_in_whole for unit in units):
        return False
    return not any(
        compat.is_ignored_by_ddp(s.sharded) for unit in units for s in unit.fsdp_params()
    )

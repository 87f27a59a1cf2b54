"""Names the modules where a forward computes with a parameter of a unit that it has not called.

An operator that meets a sharded parameter beside a plain tensor raises, and does not know modules.
The hook after the innermost forward, which runs on every rank, adds them to its message.
"""

from __future__ import annotations

from vescale_fsdp.engine.engine import engine_of
from vescale_fsdp.engine.fsdp_param import local_of
from vescale_fsdp.engine.unit import Unit
from vescale_fsdp.ragged import OPERANDS


def explain_uncalled(unit: Unit, error: BaseException) -> None:
    """Say in an error which unit was not called.

    Args:
        unit: whose forward the error ends.
    """
    ids, engine = getattr(error, OPERANDS, None), engine_of(unit)
    if not ids or engine is None:
        return
    setattr(error, OPERANDS, None)  # forwards around this one have nothing to add
    for other in engine.units():
        name = next(
            (
                fsdp_param.fqn
                for fsdp_param in other.fsdp_params()
                if id(local_of(fsdp_param.sharded)) in ids
            ),
            None,
        )
        if name is not None and not other.running.depth:
            error.args = (f"{_reason(name, unit, other)} {error}",)
            return


def _reason(name: str, caller: Unit, owner: Unit) -> str:
    where = f"{caller.fqn!r} ({caller.kind})" if caller.fqn else caller.kind
    return (
        f"the forward of {where} computes with the parameter {name!r} of the unit {owner.fqn!r} "
        f"({owner.kind}) without calling that, so it is sharded. Do not shard {owner.kind} on its "
        'own (Lightning: VeScaleFSDPStrategy(wrap="none"), or the classes that are called; '
        "Accelerate: fsdp_auto_wrap_policy: NO_WRAP, or fsdp_transformer_layer_cls_to_wrap); if a "
        "module in it is called from outside of it, shard that on its own too; if a method other "
        "than forward is, use register_fsdp_forward_method."
    )

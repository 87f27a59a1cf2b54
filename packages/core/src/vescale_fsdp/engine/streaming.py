"""``stream_parameters``: yields whole parameters one after the other, renamed or merged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat
from vescale_fsdp.engine.buckets import Bucket, Output, Source, To, make_buckets
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.ranks import limit_s, over

BUCKET_BYTES = 512 << 20


def stream_parameters(
    model: nn.Module,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    to: To = "all",
    rename: Callable[[str], str | None] | None = None,
    merge: Mapping[str, Sequence[str]] | None = None,
    tied: Literal["once", "each"] = "once",
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the whole parameters of a sharded model, one after the other. Collective.

    Use it to send weights to an inference engine, to export them, or to average them::

        for name, tensor in vescale_fsdp.stream_parameters(model, dtype=torch.bfloat16):
            engine.load_weights([(name, tensor)])

    The order and the names are those of ``model.named_parameters()``; prefixes of wrappers such as
    ``torch.compile`` are removed. Each tensor is new and without gradients. The caller may keep it
    or write to it. The model does not change, and none of its units is unsharded. Values are read
    from the shards, so changes made inside of `unsharded` appear only after that context.

    All ranks iterate, with the same arguments, and do not step the optimizer meanwhile. They may
    stop early if all of them stop after the same parameter.

    Args:
        model: has parameters sharded by ``fully_shard``, or other DTensors, or plain ones.
        bucket_bytes: the most bytes of parameters in one collective. A larger parameter has a
            collective of its own.
        dtype: the dtype of the tensors. None: that of each parameter. Parameters are cast before
            they are sent. Parameters that are not floating-point are not cast.
        to: ``"all"``: every rank gets the tensors, on the device of the mesh. ``"cpu"``: every rank
            gets them in the memory of the host. A global rank: that rank gets them, and the others
            get None in their place. With replicas (HSDP), the other replicas then send nothing.
        rename: takes a parameter's name, and returns the name to yield. If it returns None, the
            parameter is left out.
        merge: parameters to concatenate along dimension 0, by the names of the results, after
            ``rename``. A ``*`` is any text::

                merge={"*.qkv.weight": ["*.q.weight", "*.k.weight", "*.v.weight"]}

            A merged parameter takes the place of the first of its parts.
        tied: a parameter with several names is yielded under the first one (``"once"``), or under
            each, one after the other, as the same tensor (``"each"``).

    Yields:
        The name, and a tensor with the parameter's whole shape.

    Cost:
        One round through the store, and one uneven all-gather a bucket: each rank receives the
        elements of the others once. With a single receiver, the others only send.
        Memory beside the shards: two buckets at most, and the tensors that the caller holds. A
        bucket is smaller than ``bucket_bytes`` by its largest parameter: two whole tensors exist
        when the caller's loop moves from one to the next.

    Raises:
        ValueError: an argument has another value than those above, ``merge`` names a part that is
            missing or does not fit the others, or two parameters would have one name.
        RuntimeError: a parameter is still on meta.
        RankMismatchError: ranks have different parameters or arguments, or one did not come in
            time.
    """
    _check(bucket_bytes, dtype, to, tied)
    outputs = _outputs(model, dtype, rename, merge or {}, tied)
    buckets = make_buckets(outputs, bucket_bytes, to)
    _agree(outputs, bucket_bytes, to)
    return _stream(buckets, to)


def _check(bucket_bytes: int, dtype: torch.dtype | None, to: To, tied: str) -> None:
    """Raise for a wrong argument of `stream_parameters`."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type or None, got {dtype}")
    size = dist.get_world_size() if dist.is_initialized() else 1
    is_rank = isinstance(to, int) and not isinstance(to, bool)
    if to not in ("all", "cpu") and not (is_rank and 0 <= to < size):  # type: ignore[operator]
        raise ValueError(f'to must be "all", "cpu" or a rank from 0 to {size - 1}, got {to!r}')
    if tied not in ("once", "each"):
        raise ValueError(f'tied must be "once" or "each", got {tied!r}')


def _outputs(
    model: nn.Module,
    dtype: torch.dtype | None,
    rename: Callable[[str], str | None] | None,
    merge: Mapping[str, Sequence[str]],
    tied: str,
) -> list[Output]:
    """The tensors of the stream, in order."""
    sources: dict[int, Source] = {}  # by the parameter, which may have several names
    found: dict[str, tuple[Sequence[str], dict[int, Source]]] = {}  # parts of each, and those seen
    for own_name, param in _named_parameters(model):
        name = own_name if rename is None else rename(own_name)
        if name is None:
            continue
        if param.is_meta:
            raise RuntimeError(
                f"{own_name} is on meta; materialize the model before its parameters are streamed"
            )
        is_cast = dtype is not None and param.is_floating_point()
        sent_as = dtype if is_cast and dtype else param.dtype
        source = sources.setdefault(id(param), Source(own_name, param.detach(), sent_as))
        result, parts, number = _part_of(name, merge)
        expected, seen = found.setdefault(result, (parts, {}))
        first = next(iter(seen.values()), source)
        other = seen.setdefault(number, source if parts == expected else first)
        if other is not source:
            raise ValueError(
                f"{other.name} and {own_name} would both be {result!r}; see rename and merge"
            )
    outputs = [
        Output([result], _put_together(result, parts, seen))
        for result, (parts, seen) in found.items()
    ]
    return _untied(outputs, tied)


def _untied(outputs: list[Output], tied: str) -> list[Output]:
    """Join outputs of the same parameters to one, with the first name or with all names."""
    firsts: dict[tuple[Source, ...], Output] = {}
    for output in outputs:
        first = firsts.setdefault(tuple(output.sources), output)
        if first is not output and tied == "each":
            first.names += output.names
    return [*firsts.values()]


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The sharded parameters under all of their names, also of a unit that is unsharded."""
    fsdp_params = [
        s for unit in units_in(model).values() for group in unit.groups for s in group.fsdp_params
    ]
    sharded = {id(fsdp_param.gathered): fsdp_param.sharded for fsdp_param in fsdp_params}
    for path, param in model.named_parameters(remove_duplicate=False):
        yield compat.fqn_of(model, path), sharded.get(id(param), param)


def _part_of(name: str, merge: Mapping[str, Sequence[str]]) -> tuple[str, Sequence[str], int]:
    """The result to which a parameter belongs, all parts of the result, and this one's index."""
    for result, parts in merge.items():
        for number, part in enumerate(parts):
            found = re.fullmatch(re.escape(part).replace(r"\*", "(.*)"), name)
            if found:
                texts = found.groups()
                return _filled(result, texts), [_filled(each, texts) for each in parts], number
    return name, [name], 0


def _filled(pattern: str, texts: Sequence[str]) -> str:
    """Replace each ``*`` of a pattern by a text."""
    left = iter(texts)
    return re.sub(r"\*", lambda _: next(left, "*"), pattern)


def _put_together(result: str, names: Sequence[str], found: Mapping[int, Source]) -> list[Source]:
    """The sources of an output, in order. Raises if one is missing or does not fit."""
    missing = [name for number, name in enumerate(names) if number not in found]
    if missing:
        raise ValueError(
            f"{result} is merged from {', '.join(names)}, but {' and '.join(missing)} is no "
            "parameter, or part of another one; see merge"
        )
    first, *others = sources = [found[number] for number in range(len(names))]
    for other in others:
        if not first.shape or other.shape[1:] != first.shape[1:] or other.dtype != first.dtype:
            raise ValueError(
                f"{other.name} {tuple(other.shape)} {other.dtype} cannot be merged with "
                f"{first.name} {tuple(first.shape)} {first.dtype} into {result}: all dimensions "
                "but the first must be equal, and the dtype"
            )
    return sources


def _agree(outputs: list[Output], bucket_bytes: int, to: To) -> None:
    """Raise unless the ranks that share parameters stream the same ones, in the same way."""
    params = [source.param for output in outputs for source in output.sources]
    meshes = [param.device_mesh for param in params if isinstance(param, DTensor)]
    widest = max(meshes, key=lambda mesh: mesh.size(), default=None)
    if widest is None:
        return
    entries = [f"bucket_bytes={bucket_bytes}, to={to!r}"]
    for output in outputs:
        parts = [f"{each.name} {tuple(each.shape)} {each.dtype}" for each in output.sources]
        entries.append(f"{', '.join(output.names)}: {', '.join(parts)}")
    ranks = sorted(widest.mesh.flatten().tolist())
    advice = "All ranks call stream_parameters on the same model, with the same arguments."
    late = limit_s(may_be_late=True)
    over(ranks).agree("parameters to stream", entries, advice, timeout_s=late)


def _stream(buckets: list[Bucket], to: To) -> Iterator[tuple[str, Tensor | None]]:
    ahead: Bucket | None = None
    try:
        for bucket, following in pairwise([None, *buckets, None]):
            if bucket is not None:
                bucket.wait()
            ahead = following
            if following is not None:
                following.start()
            if bucket is not None:
                yield from bucket.tensors(to)
    finally:
        if ahead is not None:  # the caller has left the loop, but a collective uses the memory
            ahead.wait()

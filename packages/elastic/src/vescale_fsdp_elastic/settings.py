"""`ElasticOptions`: the arguments of `training` for loops of Lightning and of transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """How a Trainer continues when ranks come and go. See `training` for what is not said here.

    Args:
        directory: of the run on disk, on a file system that all ranks share.
        global_batch: samples of an optimizer step, of all ranks together.
        every: optimizer steps between memory checkpoints.
        replicas: number of other hosts that get a copy of each rank's part.
        every_on_disk: optimizer steps between checkpoints on disk. None: only at the end, and after
            a signal.
        keep_last: checkpoints on disk that are kept.
        memory_directory: by default ``VESCALE_FSDP_MEMORY_DIR``, or a folder in ``/dev/shm``.

    Raises:
        ValueError: a value is too small.
    """

    directory: str | os.PathLike[str]
    global_batch: int
    every: int = 10
    replicas: int = 1
    every_on_disk: int | None = 1000
    keep_last: int = 2
    memory_directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        least = {"global_batch": 1, "every": 1, "replicas": 0, "every_on_disk": 1, "keep_last": 2}
        for name, number in least.items():
            value = getattr(self, name)
            if name == "every_on_disk" and value is None:
                continue
            if type(value) is not int or value < number:
                raise ValueError(
                    f"ElasticOptions({name}={value!r}) does not work; expected an int of at least "
                    f"{number}"
                )

    @classmethod
    def of(cls, value: ElasticOptions | Mapping[str, Any]) -> ElasticOptions:
        """Return the options of a mapping, such as one of a yaml file.

        Raises:
            ValueError: a name is unknown or missing, or a value too small.
        """
        if isinstance(value, cls):
            return value
        known = list(cls.__dataclass_fields__)
        unknown = [] if not isinstance(value, Mapping) else sorted(value.keys() - set(known))
        if (
            not isinstance(value, Mapping)
            or unknown
            or not {"directory", "global_batch"} <= {*value}
        ):
            raise ValueError(
                f"elastic={value!r} does not work; expected an ElasticOptions, or a mapping with "
                f"directory and global_batch, and of {', '.join(known[2:])} what differs from the "
                "default"
            )
        return cls(**value)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `training`."""
        made = asdict(self)
        del made["directory"], made["global_batch"]
        return made

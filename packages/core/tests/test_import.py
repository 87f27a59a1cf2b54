"""What an import loads, and that every public name is there."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import typing

import pytest

import vescale_fsdp

PACKAGES = [
    "vescale_fsdp",
    "vescale_fsdp.planner",
    "vescale_fsdp.ragged",
    "vescale_fsdp.dbuffer",
    "vescale_fsdp.engine",
    "vescale_fsdp.checkpoint",
    "vescale_fsdp.checkpoint.foreign",
    "vescale_fsdp.optim",
    "vescale_fsdp.spi",
    "vescale_fsdp.cli",
    "vescale_fsdp.testing",
]


def loaded_after(*statements: str) -> list[set[str]]:
    """The modules that a new interpreter has loaded after each of the statements."""
    code = "import sys\n" + "".join(f"{each}\nprint(*sys.modules)\n" for each in statements)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return [set(line.split()) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    "statement",
    [
        "import vescale_fsdp",
        "import vescale_fsdp.planner",
        "from vescale_fsdp import planner; planner.plan([planner.TensorSpec('a', (4,), 1)], 2)",
        "from vescale_fsdp import PlanError, VeScaleError",
        "import vescale_fsdp; dir(vescale_fsdp)",
    ],
)
def test_names_and_planner_do_not_load_torch(statement: str) -> None:
    (loaded,) = loaded_after(statement)
    assert "vescale_fsdp" in loaded
    assert not loaded & {"torch", "numpy"}


def test_packages_load_at_first_use() -> None:
    of_name, of_engine, of_use = loaded_after(
        "from vescale_fsdp import RaggedShard",
        "import vescale_fsdp.engine",
        "import vescale_fsdp; vescale_fsdp.optim.flatten_",
    )
    assert "torch" in of_name  # the premise of the test above: loading would be seen
    assert "vescale_fsdp.optim" not in of_engine
    assert "vescale_fsdp.optim" in of_use


def test_engine_loads_few_files() -> None:
    (loaded,) = loaded_after("import vescale_fsdp.engine")
    ours = sorted(name for name in loaded if name.partition(".")[0] == "vescale_fsdp")
    assert len(ours) <= 90, f"{len(ours)} files are loaded:\n" + "\n".join(ours)
    assert not [name for name in ours if name.startswith("vescale_fsdp.testing")]


USE_OF_OUR_FORMAT = """
import tempfile, torch
from vescale_fsdp import checkpoint
model = torch.nn.Linear(1, 1)
path = tempfile.mkdtemp() + "/ours"
checkpoint.save(path, model, extra={"step": 1})
assert checkpoint.load(path, model) == {"step": 1} == checkpoint.read_extra(path)
checkpoint.read(path), checkpoint.unread_state(path), checkpoint.verify(path), dir(checkpoint)
"""


def test_foreign_formats_of_checkpoints_are_loaded_when_they_are_asked_for() -> None:
    *before, after = loaded_after(
        "import vescale_fsdp.checkpoint",
        "import vescale_fsdp.spi, vescale_fsdp.cli.checkpoint_contents",
        USE_OF_OUR_FORMAT,
        "from vescale_fsdp.checkpoint import export_dcp",
    )
    name = "vescale_fsdp.checkpoint.foreign"
    assert [each for loaded in before for each in loaded if each.startswith(name)] == []
    assert name in after


def test_names_for_foreign_formats_of_checkpoints() -> None:
    from vescale_fsdp import checkpoint, spi
    from vescale_fsdp.checkpoint import foreign

    for name in ("convert", "export_dcp", "import_dcp"):
        assert getattr(checkpoint, name) is getattr(foreign, name)
        assert name in dir(checkpoint)
    assert spi.MetadataUnpickler is foreign.MetadataUnpickler
    for module in (checkpoint, spi):
        with pytest.raises(AttributeError, match=f"'{module.__name__}' has no attribute 'dcp'"):
            _ = module.dcp


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_resolves(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


PUBLIC = """
    CPUOffloadPolicy CheckpointCorruptError CheckpointIncompleteError FSDPModule Granularity
    MixedPrecisionPolicy NonFiniteError OffloadPolicy PlanError RaggedShard RaggedTensor
    RankMismatchError UnshardHandle VeScaleError clip_grad_norm_ combine fully_shard
    register_fsdp_forward_method unsharded
"""


@pytest.mark.parametrize("name", PUBLIC.split())
def test_promised_name_is_public(name: str) -> None:
    assert name in vescale_fsdp.__all__
    assert name in dir(vescale_fsdp)


def test_lazy_name_is_the_one_of_its_home() -> None:
    from vescale_fsdp.engine import fully_shard
    from vescale_fsdp.ragged import RaggedShard

    assert vescale_fsdp.fully_shard is fully_shard
    assert vescale_fsdp.RaggedShard is RaggedShard


def test_policies_for_offload_are_torchs_own() -> None:
    from torch.distributed import fsdp

    assert vescale_fsdp.OffloadPolicy is fsdp.OffloadPolicy
    assert vescale_fsdp.CPUOffloadPolicy is fsdp.CPUOffloadPolicy
    assert vescale_fsdp.MixedPrecisionPolicy is fsdp.MixedPrecisionPolicy


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'vescale_fsdp' has no attribute 'fully_sharded'"):
        _ = vescale_fsdp.fully_sharded


@pytest.mark.parametrize(
    ("statement", "companion"),
    [
        ("from vescale_fsdp import elastic", "elastic"),
        ("import vescale_fsdp.elastic", "elastic"),
        ("from vescale_fsdp.elastic import training", "elastic"),
        ("import vescale_fsdp; vescale_fsdp.elastic.training", "elastic"),
        ("from vescale_fsdp import Budget", "tune"),
        ("from vescale_fsdp import tuning_of", "tune"),
        ("from vescale_fsdp.costs import Machine", "tune"),
        ("import vescale_fsdp; vescale_fsdp.costs.Link", "tune"),
    ],
)
def test_what_has_moved_raises_with_its_new_name(statement: str, companion: str) -> None:
    match = rf"pip install 'vescale-fsdp\[{companion}\]', and import vescale_fsdp_{companion}"
    with pytest.raises((ImportError, AttributeError), match=match):
        exec(statement)


def test_hints_of_public_functions_resolve() -> None:
    for name in vescale_fsdp.__all__:
        value = getattr(vescale_fsdp, name)
        if inspect.isfunction(value):
            assert typing.get_type_hints(value), name


@pytest.mark.parametrize("package", ["engine", "dbuffer", "spi"])
def test_names_that_are_loaded_later_are_listed(package: str) -> None:
    module = importlib.import_module(f"vescale_fsdp.{package}")
    assert set(module.__all__) <= set(dir(module))


def test_absent_names_can_be_asked_for() -> None:
    assert not hasattr(vescale_fsdp, "elastic")
    assert not hasattr(vescale_fsdp, "costs")

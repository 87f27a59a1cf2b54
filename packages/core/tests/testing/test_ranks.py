"""``run_ranks``: results, failures, and the life of the pool."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp.testing import RankError, assert_equal_across_ranks, free_port, run_ranks
from vescale_fsdp.testing.ranks import _pools
from vescale_fsdp.testing.worker import dump

from . import sibling


def rank_and_argument(argument: str) -> tuple[int, int, str]:
    return dist.get_rank(), dist.get_world_size(), argument


def process_id() -> int:
    return os.getpid()


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("no such thing")


def raise_everywhere() -> None:
    raise ValueError(f"rank {dist.get_rank()} is unhappy")


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def warn_old_way() -> None:
    warnings.warn("the old way", DeprecationWarning, stacklevel=1)


def state_of_rank() -> tuple[int, float, float, str, str | None]:
    variable = os.environ.get("VESCALE_TEST_VARIABLE")
    return (
        torch.get_num_threads(),
        torch.rand(()).item(),
        random.random(),
        os.getcwd(),
        variable,
    )


def sum_of_ranks() -> torch.Tensor:
    total = torch.full((3,), float(dist.get_rank()), requires_grad=True)
    dist.all_reduce(total.data)
    return total * 2


def leave_a_group_behind() -> int:
    dist.new_group([0, 1])
    return dist.get_pg_count()


def norm_in_sibling(point: sibling.Point) -> tuple[int, sibling.Point]:
    return sibling.norm(point), sibling.Point(dist.get_rank(), 0)


def say_something() -> None:
    print(f"here is rank {dist.get_rank()}")


def unequal_across_ranks() -> None:
    same = torch.arange(4.0)
    assert_equal_across_ranks({"same": same, "nan": torch.tensor(float("nan"))})
    assert_equal_across_ranks([same, same + dist.get_rank()], "pair")


def return_a_lambda() -> object:
    return lambda: None


def test_results_come_in_rank_order() -> None:
    assert run_ranks(rank_and_argument, 3, "x") == [(0, 3, "x"), (1, 3, "x"), (2, 3, "x")]


def test_tensors_come_back_by_value() -> None:
    for total in run_ranks(sum_of_ranks, 2):
        assert total.tolist() == [2.0, 2.0, 2.0]


def test_pool_is_reused_and_separate_by_world_size() -> None:
    first = run_ranks(process_id, 2)
    assert run_ranks(process_id, 2) == first
    assert run_ranks(process_id, 1)[0] not in first


def test_groups_of_a_call_do_not_reach_the_next() -> None:
    assert run_ranks(leave_a_group_behind, 2) == run_ranks(leave_a_group_behind, 2)


def test_state_is_the_same_at_every_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VESCALE_TEST_VARIABLE", "seen")
    monkeypatch.chdir(tmp_path)
    first, second = run_ranks(state_of_rank, 1), run_ranks(state_of_rank, 1)
    assert first == second
    num_threads, _, _, directory, variable = first[0]
    assert (num_threads, directory, variable) == (1, str(tmp_path), "seen")
    monkeypatch.delenv("VESCALE_TEST_VARIABLE")
    assert run_ranks(state_of_rank, 1)[0][-1] is None


def test_failure_of_one_rank_names_it() -> None:
    with pytest.raises(RankError, match="1 of 2 ranks failed, rank 1 first") as caught:
        run_ranks(raise_on_rank_1, 2)
    assert (caught.value.rank, caught.value.type_name) == (1, "KeyError")
    assert "in raise_on_rank_1" in caught.value.traceback
    assert len(caught.value.failures) == 1


def test_failures_of_all_ranks_are_listed() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(raise_everywhere, 2)
    messages = {failure.rank: failure.message for failure in caught.value.failures}
    assert messages == {0: "rank 0 is unhappy", 1: "rank 1 is unhappy"}


def test_ranks_are_new_after_a_failure() -> None:
    before = run_ranks(process_id, 2)
    with pytest.raises(RankError):
        run_ranks(raise_everywhere, 2)
    assert not set(before) & set(run_ranks(process_id, 2))


def test_hung_rank_is_killed_and_tells_where_it_was() -> None:
    pid = run_ranks(process_id, 2)[1]
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(hang_on_rank_1, 2, timeout_s=0.5)
    assert time.monotonic() - begin < 20
    assert (caught.value.rank, caught.value.type_name) == (1, "RankHung")
    assert "did not finish within 0.5 s" in caught.value.message
    assert "in hang_on_rank_1" in caught.value.traceback
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_dead_rank_is_reported_and_the_next_call_works() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(die_on_rank_0, 2)
    assert (caught.value.rank, caught.value.type_name) == (0, "RankDied")
    assert "exit code -9" in caught.value.message
    assert run_ranks(rank_and_argument, 2, "") == [(0, 2, ""), (1, 2, "")]


def die_while_nobody_reaps() -> None:
    """Rank 1 stops the process that reaps it, as one that gets no time is, and exits with 77."""
    if dist.get_rank() == 1:
        server = os.getppid()
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {server}"], start_new_session=True)
        os.kill(server, signal.SIGSTOP)
        os._exit(77)


def test_exit_code_of_a_rank_that_is_reaped_late_is_known() -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code 77 and sent no result"):
        run_ranks(die_while_nobody_reaps, 2)


def test_rank_that_died_between_calls_is_replaced() -> None:
    os.kill(run_ranks(process_id, 2)[0], signal.SIGKILL)
    while _pools[2].is_alive():
        time.sleep(0.01)
    assert len(run_ranks(process_id, 2)) == 2


def test_module_that_imports_its_sibling_is_loaded_under_the_same_name() -> None:
    results = run_ranks(norm_in_sibling, 2, sibling.Point(3, -4))
    assert results == [(7, sibling.Point(0, 0)), (7, sibling.Point(1, 0))]


def load_unimportable(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load a file under a name that no finder knows, as pytest does with test modules."""
    spec = importlib.util.spec_from_file_location("known_to_no_finder", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "known_to_no_finder", module)
    spec.loader.exec_module(module)
    return module


def test_changed_module_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "changing.py"
    path.write_text("def answer():\n    return 1\n")
    module = load_unimportable(path, monkeypatch)
    assert run_ranks(module.answer, 1) == [1]
    path.write_text("def answer():\n    return 22\n")
    assert run_ranks(module.answer, 1) == [22]


def test_sources_list_packages_before_their_modules() -> None:
    _, sources = dump((sibling.norm,))
    names = [source.name for source in sources]
    assert names[-1] == sibling.__name__
    assert names == sorted(names, key=len)


def test_warning_filters_of_the_caller_hold_in_the_ranks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(warn_old_way, 1) == [None]
        warnings.simplefilter("error")
        with pytest.raises(RankError, match="DeprecationWarning: the old way"):
            run_ranks(warn_old_way, 1)


def test_output_of_ranks_arrives_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(say_something, 2)
    text = capsys.readouterr().err
    assert "[rank 0] here is rank 0\n" in text
    assert "[rank 1] here is rank 1\n" in text


def test_function_that_does_not_pickle_is_refused() -> None:
    with pytest.raises(TypeError, match="function at the top level of a module"):
        run_ranks(lambda: None, 1)


def test_result_that_does_not_pickle_is_the_ranks_failure() -> None:
    with pytest.raises(RankError, match="return_a_lambda"):
        run_ranks(return_a_lambda, 1)


def test_world_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_ranks(process_id, 0)


def test_assert_equal_across_ranks_names_the_first_difference() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(unequal_across_ranks, 2)
    assert [failure.type_name for failure in caught.value.failures] == ["AssertionError"] * 2
    assert "pair[1] differs on rank 1 from rank 0: 4 of 4 elements, by up to 1" in str(caught.value)


def test_free_port_is_a_port() -> None:
    assert 1024 <= free_port() <= 65535

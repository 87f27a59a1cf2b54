"""Sends matrices to their owners and results back, overlapped with computation.

There is one uneven all-to-all in each direction per bucket. While a rank computes one bucket, it
receives the next one and sends the results of the one before::

    gather 0   gather 1 .......   gather 2 .......
               compute 0          compute 1           compute 2
                                  scatter 0 .......   scatter 1 .......   scatter 2

So two buckets in each direction are in memory at a time. On gloo, a long all-to-all is replaced by
sends and receives of the same bytes, which use both directions at the same time (see `Exchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from vescale_fsdp.backends import backend_name
from vescale_fsdp.dbuffer import SHORTEST_BYTES, Exchange
from vescale_fsdp.optim.layout import Matrix, Part
from vescale_fsdp.optim.routes import Bucket, Routes, Run
from vescale_fsdp.ragged import as_bytes
from vescale_fsdp.ranks import collectives, waits

# Returns the values of a run of a parameter's flat local tensor, [stop - start], to be read only.
Source = Callable[[Run], torch.Tensor]
# Returns the result of a matrix from its index and its values; both are [rows, cols]. The values
# are only read.
Compute = Callable[[int, torch.Tensor], torch.Tensor]
# Gets the flat results of a run. The run may contain several consecutive matrices of one shape; the
# index is that of the first.
Sink = Callable[[Run, int, torch.Tensor], None]


def from_tensors(tensors: Sequence[torch.Tensor]) -> Source:
    """Return a source that reads from local tensors, one per parameter."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return lambda run: flat[run.param][run.start : run.stop]


class _InFlight:
    """A running all-to-all. It holds the sent tensor until the end."""

    def __init__(
        self, work: dist.Work | Exchange, received: torch.Tensor, sent: torch.Tensor
    ) -> None:
        self._work, self._tensors = work, (received, sent)

    def wait(self) -> torch.Tensor:
        """Wait, and return the received tensor. Call it once."""
        waits.wait(self._work, "an exchange of matrices for the optimizer")
        received, _ = self._tensors
        del self._tensors, self._work
        return received


class Transport:
    """Runs a function on whole matrices, each on its owner. The values come from shards.

    Args:
        matrices: the matrices of the routes.
        routes: the routes of this rank.
        group: the process group of the members. None: there is only one member.
        gather_dtype: dtype of values in messages and in calls of the function.
        scatter_dtype: dtype of results in messages and in calls of the sink.
        device: for received messages and for the function.

    Cost of `run`: at most two uneven all-to-alls for each bucket, of the elements that are not on
    the right rank.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        routes: Routes,
        group: dist.ProcessGroup | None,
        *,
        gather_dtype: torch.dtype,
        scatter_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._matrices, self._routes, self._group = matrices, routes, group
        self._gather_dtype, self._scatter_dtype = gather_dtype, scatter_dtype
        self._device = device

    def run(self, source: Source, compute: Compute, sink: Sink) -> None:
        """Compute each matrix once, on its owner, and send the results to all ranks with parts.

        All members call it. The source is called in any order, also after the sink was called for
        other matrices. So the sink must not change the values of the source.
        """
        buckets = self._routes.buckets
        arriving = self._start_gather(buckets[0], source) if buckets else None
        returning: tuple[Bucket, _InFlight | None] | None = None
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            gather = arriving
            arriving = self._start_gather(following, source) if following else None
            results = {index: compute(index, self._held(index, source)) for index in bucket.ready}
            received = gather.wait() if gather is not None else None
            for index in bucket.gathered:
                assert received is not None, "the bucket has a gather"
                results[index] = compute(index, self._assembled(bucket, index, received, source))
            del received, gather
            results = {index: result.contiguous() for index, result in results.items()}
            scatter = self._start_scatter(bucket, results)
            self._keep(bucket, results, sink)
            if returning is not None:
                self._finish_scatter(*returning, sink)
            returning = (bucket, scatter)
        if returning is not None:
            self._finish_scatter(*returning, sink)

    def _held(self, index: int, source: Source) -> torch.Tensor:
        """Return a matrix that is whole on this rank."""
        matrix = self._matrices[index]
        values = [source(_run_of(matrix, part)) for part in matrix.parts]
        return self._joined(matrix, values)

    def _assembled(
        self, bucket: Bucket, index: int, received: torch.Tensor, source: Source
    ) -> torch.Tensor:
        """Return a matrix made of own and received parts."""
        matrix = self._matrices[index]
        values = [
            source(_run_of(matrix, part)) if start is None else received[start : start + part.numel]
            for part, start in bucket.assembly[index]
        ]
        return self._joined(matrix, values)

    def _joined(self, matrix: Matrix, values: list[torch.Tensor]) -> torch.Tensor:
        """Join the values of a matrix' parts to [rows, cols]."""
        if matrix.has_runs:
            typed = [each.to(self._device, self._gather_dtype) for each in values]
            flat = typed[0] if len(typed) == 1 else torch.cat(typed)
            return flat.view(matrix.rows, matrix.cols)
        whole = self._empty(matrix.numel, self._gather_dtype).view(matrix.rows, matrix.cols)
        for part, each in zip(matrix.parts, values, strict=True):
            view = part.of(whole)
            view.copy_(each.view(view.shape))
        return whole

    def _start_gather(self, bucket: Bucket, source: Source) -> _InFlight | None:
        if not bucket.longest_send:
            return None
        sent = self._empty(sum(bucket.send_counts), self._gather_dtype)
        lengths = [run.stop - run.start for run in bucket.sends]
        for run, place in zip(bucket.sends, sent.split(lengths), strict=True):
            place.copy_(source(run))
        return self._exchange(
            sent, bucket.send_counts, bucket.receive_counts, longest=bucket.longest_send
        )

    def _start_scatter(self, bucket: Bucket, results: dict[int, torch.Tensor]) -> _InFlight | None:
        if not bucket.longest_return:
            return None
        sent = self._empty(sum(bucket.return_counts), self._scatter_dtype)
        lengths = [part.numel for _, part in bucket.returns]
        for (index, part), place in zip(bucket.returns, sent.split(lengths), strict=True):
            values = part.of(results[index])
            place.view(values.shape).copy_(values)
        return self._exchange(
            sent, bucket.return_counts, bucket.arrival_counts, longest=bucket.longest_return
        )

    def _finish_scatter(self, bucket: Bucket, scatter: _InFlight | None, sink: Sink) -> None:
        if scatter is None:
            return
        received = scatter.wait()
        lengths = [run.stop - run.start for run, _ in bucket.arrivals]
        for (run, index), values in zip(bucket.arrivals, received.split(lengths), strict=True):
            sink(run, index, values)

    def _keep(self, bucket: Bucket, results: dict[int, torch.Tensor], sink: Sink) -> None:
        """Pass the results for this rank's own parts to the sink."""
        for index in bucket.ready:
            matrix = self._matrices[index]
            for part in matrix.parts:
                self._keep_part(index, part, results[index], sink)
        for index in bucket.gathered:
            for part, start in bucket.assembly[index]:
                if start is None:
                    self._keep_part(index, part, results[index], sink)

    def _keep_part(self, index: int, part: Part, result: torch.Tensor, sink: Sink) -> None:
        values = part.of(result).reshape(-1).to(self._scatter_dtype)
        sink(_run_of(self._matrices[index], part), index, values)

    def _exchange(
        self, sent: torch.Tensor, sent_counts: list[int], received_counts: list[int], longest: int
    ) -> _InFlight:
        """Start an all-to-all. ``longest`` is the length of the longest message of any rank."""
        received = self._empty(sum(received_counts), sent.dtype)
        assert self._group is not None, "who sends to others has a group"
        is_gloo = self._device.type == "cpu" and backend_name(self._group, "cpu") == "gloo"
        if is_gloo and longest * sent.element_size() >= SHORTEST_BYTES:
            outgoing = [as_bytes(part) for part in sent.split(sent_counts)]
            incoming = [as_bytes(part) for part in received.split(received_counts)]
            exchange = Exchange(outgoing, incoming, dist.get_rank(self._group), self._group)
            return _InFlight(exchange, received, sent)
        size = sent.element_size()
        work = collectives.all_to_all_single(
            as_bytes(received),
            as_bytes(sent),
            self._group,
            [count * size for count in received_counts],
            [count * size for count in sent_counts],
        )
        return _InFlight(work, received, sent)

    def _empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, device=self._device)


def _run_of(matrix: Matrix, part: Part) -> Run:
    return Run(matrix.param, part.local, part.local + part.numel)

"""A simulator of an accelerator on the CPU: what a GPU would do wrong shows as other numbers.

The engine's real code runs. `streams` has the queues and the orders in which they are carried out,
`memory` what a caching allocator does with the addresses, `simulator` brings both under torch's
operators and the engine's collectives. `scenarios` are the trainings that run in it.
The faults that it has to find are in `tests/mutations`.

Kernels are not run when they are called. They wait in the queue of their stream, until something
has to be known on the host, and are then carried out in an order that is chosen to hurt. Memory is
reused at once, as by the caching allocator, and each allocation queues a fill with NaN. If every
order gives the bits of an eager run, then each kernel has waited for all that it reads and writes.
"""

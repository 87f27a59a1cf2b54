"""What ``vescale-fsdp doctor`` looks at, one file each.

`findings` has what all of them return. `software` (versions, with `ranges`), `host` (CPUs, memory,
limits, with `cgroup`), `devices`, and `environment` (variables) look; `selftest` starts two
processes that run `rank`, and reads what they report. `show` prints it.

Nothing here imports torch but `rank`, in a process of its own: a torch that is broken, hangs or
crashes is a finding.
"""

from __future__ import annotations

"""Runs inside a live engine under test: the name of a fault comes in, one corrupted value and a note of where goes out.

    with arm("slot_plus_one", after_steps=4) as injection:
        workload(llm)
    assert injection.what is not None and injection.what["expected"] == "write_target_mismatch"

A fault corrupts one value in one step, between the scheduler's decision and attention, or has the allocator or a
connector do one thing that it should not. It is put into functions that kvscope's own seams call, or that run before
them, never into a seam itself: it makes no difference whether kvscope is switched on, off, or installed before or after
the fault. `catalog` says what each fault does and which finding it must cause; `plugin` carries a fault into the
processes of an engine that has several.
"""

from kvscope.testing.faults.catalog import FAULTS
from kvscope.testing.faults.fault import Fault
from kvscope.testing.faults.injection import Injection, arm
from kvscope.testing.faults.workload import DRAFTING, LATENT, LOADING, PREEMPTING, SETTINGS, TRAFFIC, occasion, workload

__all__ = [
    "DRAFTING",
    "FAULTS",
    "LATENT",
    "LOADING",
    "PREEMPTING",
    "SETTINGS",
    "TRAFFIC",
    "Fault",
    "Injection",
    "arm",
    "occasion",
    "workload",
]

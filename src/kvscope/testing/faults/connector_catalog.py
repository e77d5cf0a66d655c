"""The faults of a connector's reports: of what never was, and of what the scheduler then does not take up."""

from kvscope.testing.faults.fault import Fault

CONNECTOR_FAULTS = [
    Fault(
        name="load_into_null_block",
        summary="A connector is told to load the last tokens of a request into the null block.",
        expected="connector_null_block",
        point="connector",
        traffic="loading",
    ),
    Fault(
        name="load_into_foreign_block",
        summary="A connector is told to load the last tokens of a request into a block of another one.",
        expected="connector_block_not_bound",
        point="connector",
        traffic="loading",
    ),
    Fault(
        name="unknown_request_received",
        summary="A request is reported as received that the scheduler does not have.",
        expected="connector_unknown_request",
        point="connector",
        traffic="loading",
    ),
    Fault(
        name="received_twice",
        summary="A request is reported as received with two results, one after the other.",
        expected="connector_duplicate_completion",
        point="connector",
        traffic="loading",
    ),
    Fault(
        name="received_unplanned",
        summary="A request is reported as received that runs and was never to be loaded.",
        expected="connector_completion_unplanned",
        point="connector",
        traffic="loading",
    ),
    Fault(
        name="failed_receive_lost",
        summary="A receive is reported as failed, and the scheduler passes over it.",
        expected="connector_failed_receive_lost",
        point="connector",
        traffic="loading",
    ),
    Fault(
        name="invalid_block_lost",
        summary="The first block of a receive is reported as not loaded, and the scheduler passes over it.",
        expected="connector_failed_receive_lost",
        point="connector",
        traffic="loading",
        allowed_also=frozenset({"connector_invalid_block_reused", "read_uninitialized"}),
    ),
    Fault(
        name="invalid_block_stays_cached",
        summary="A block is reported as not loaded; its request ends by that, and another one hits the block.",
        expected="connector_invalid_block_reused",
        point="connector",
        traffic="loading_twins",
        allowed_also=frozenset({"read_uninitialized"}),
    ),
]

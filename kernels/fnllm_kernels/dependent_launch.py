"""Programmatic dependent launch: a kernel starts while the previous one still runs.

Such a kernel waits (`gdc_wait`) until the one before it is complete and its writes are seen, which is so of all before
them if each waits. Until then it may read only what no kernel of a step writes: a kernel further back may be running
still. It lets the next start at once (`gdc_launch_dependents`), which puts that one's programs where this one's leave
room.
"""

import torch


def dependent_launch(device: torch.device) -> bool:
    """Whether the device starts a kernel while the one before still runs (sm_90 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device, pdl: bool | None = None) -> dict[str, bool]:
    """The keywords of a kernel's launch; pdl None: dependent where the device can."""
    dependent = dependent_launch(device) if pdl is None else pdl
    return {"PDL": True, "launch_pdl": True} if dependent else {"PDL": False}

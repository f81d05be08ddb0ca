"""Start the processes of a training on several devices of this machine, by torchrun."""

from __future__ import annotations

import logging
import os

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from regard import devices, distributed
from regard.errors import Interrupted, ReportedElsewhere, UserError


def run_on_devices(words: list[str], count: int, device: str) -> None:
    """Run `regard` with these words in `count` processes, each with a GPU of its own if there are GPUs.

    Short for `torchrun --standalone --nproc-per-node COUNT -m regard WORDS`.
    """
    if distributed.is_launched():
        raise UserError("--devices starts the processes itself: leave it out under torchrun")
    where = devices.pick(device)
    if where.type == "cuda" and (gpus := devices.gpu_count()) < count:
        raise UserError(f"--devices {count}, but this machine has {gpus} GPU{'s' * (gpus != 1)}")
    if where.index is not None:
        raise UserError(f"--device {device} is one device: use --device {where.type} with --devices")
    cores = max((os.cpu_count() or 1) // count, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(cores))  # each process would use all cores
    for name in ("torch.distributed.elastic", *logging.root.manager.loggerDict):  # children have their own levels
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the processes report what fails
    try:
        torchrun(["--standalone", "--nproc-per-node", str(count), "-m", "regard", *words])
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode  # negative: ended by a signal
        raise ReportedElsewhere("", status if status > 0 else 128 - status) from error
    except SignalException as stop:
        raise Interrupted("", 128 + stop.sigval) from stop

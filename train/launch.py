"""``headstart train --num-processes N``: N processes on this machine that find each other through their environment.

accelerate launch starts several machines and other engines. Between it and the ranks stands torchrun, which makes a
failure of every SIGTERM and is ended by SIGUSR1; here both reach the ranks, which save and end well.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from headstart.train.stop import SIGNALS

GRACE = 20.0  # seconds that the other ranks get once one has failed


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Runs ``python -m headstart.train`` with ``arguments`` in as many ``processes``; returns the first exit status
    that is not 0. Raises ValueError for more of them than there are devices."""
    environment = os.environ | common(processes)
    ranks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {s: signal.signal(s, forward) for s in SIGNALS}
    try:
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "headstart.train", *arguments]
            ranks.append(subprocess.Popen(command, env=environment | own))
        return _wait(ranks)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        for process in ranks:
            process.kill()


def common(processes: int) -> dict[str, str]:
    """What every rank is told. Raises ValueError for more ``processes`` than there are devices."""
    import torch

    cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" or not torch.accelerator.is_available()
    if not cpu and processes > torch.accelerator.device_count():
        raise ValueError(
            f"--num-processes {processes} for {torch.accelerator.device_count()} devices: one process a device is the "
            "most; set ACCELERATE_USE_CPU=true to train on the CPU"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if cpu:
        told["ACCELERATE_USE_CPU"] = "true"
        told["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    return told


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """The first exit status that is not 0; from then on the others, who may wait for that rank forever, have GRACE."""
    deadline, failed = float("inf"), 0
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.2)
        failed = failed or next((status(rank) for rank in ranks if rank.poll()), 0)
        if failed:
            deadline = min(deadline, time.monotonic() + GRACE)
    return failed or next((status(rank) for rank in ranks if rank.returncode), 0)


def status(rank: subprocess.Popen[bytes]) -> int:
    """As a shell has it: 128 and the signal where one ended the process."""
    code = rank.returncode
    return 128 - code if code < 0 else code

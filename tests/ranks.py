"""Several ranks in a test: forked, so that what is imported once is there for all."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable

import torch

from gagar_mini.learn.parallel import Ranks, joined_ranks

TIMEOUT_S = 240


def on_ranks(size: int, work: Callable[[Ranks], object]) -> list:
    """What `work` gives on each of `size` connected ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(size):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_be, args=(rank, size, port, work, writer))
        process.start()
        writer.close()
        pipes.append(reader)
        processes.append(process)
    try:
        results = [_answer(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.terminate()
            process.join()
    for is_done, result in results:
        assert is_done, result
    return [result for _, result in results]


def _be(rank: int, size: int, port: int, work: Callable, writer: object) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        with joined_ranks() as ranks:
            writer.send((True, work(ranks)))
    except BaseException:
        writer.send((False, traceback.format_exc()))


def _answer(pipe: object) -> tuple[bool, object]:
    if not pipe.poll(TIMEOUT_S):
        return False, "a rank did not answer in time"
    try:
        return pipe.recv()
    except EOFError:
        return False, "a rank died without a word"

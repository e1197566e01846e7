"""The process that judges grammars: `python -m noria.server.judge_process`, started by `noria.server.judge`.

    stdin    Vocabulary, then StructuredOutputs        each message: its length as four bytes, then msgpack
    stdout   b"" when it is ready, then a Verdict for each

A schema or a regular expression comes from a stranger, and what compiling it costs is known only afterwards. So it is compiled
here first: at low priority, in bounded memory, in a process that can be killed, which a thread cannot.
"""

from __future__ import annotations

import os
import random
import resource
import struct
import sys
from typing import BinaryIO, TypeVar

import msgspec

from noria.server.settle import settle
from noria.text.grammar import Compiler, Vocabulary, refusal
from noria.types import RequestError, StructuredOutput

LENGTH = struct.Struct("<I")
NICENESS = 10
MEMORY_BYTES = 512 << 20  # beyond what the vocabulary takes
CPU_S = 4  # of one question; whoever asked has given up before, or is dead
TRIED_TOKENS = 24  # of a random text under the grammar: it must have a beginning, and masks that can be computed

T = TypeVar("T")


class Verdict(msgspec.Struct, frozen=True):
    """What is wrong with a grammar, if something is: the fields of a RequestError."""

    error: str | None = None
    param: str | None = None
    code: str | None = None


def main() -> None:
    """Read the vocabulary, then judge until stdin ends."""
    vocabulary = read(sys.stdin.buffer, Vocabulary)
    if vocabulary is None:
        return
    compiler = Compiler(vocabulary)
    _limit_memory()
    settle()
    os.nice(NICENESS)  # from here on: the tables are ours to build, the grammars are strangers'
    sys.stdout.buffer.write(LENGTH.pack(0))
    sys.stdout.buffer.flush()
    while (output := read(sys.stdin.buffer, StructuredOutput)) is not None:
        _limit_time()
        write(sys.stdout.buffer, judge(compiler, output))


def judge(compiler: Compiler, output: StructuredOutput) -> Verdict:
    """Compile a grammar and take some steps with it."""
    try:
        matcher = compiler.compile(output)
        choose = random.Random(0).choice
        for _ in range(TRIED_TOKENS):
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                raise refusal(output, matcher.get_error())
            places = [place for place, byte in enumerate(mask) if byte]
            if not places:
                raise refusal(output, "it allows no token of this model's vocabulary")
            place = choose(places)
            token = choose([place * 8 + bit for bit in range(8) if mask[place] >> bit & 1])
            if not matcher.consume_token(token) or matcher.is_stopped():
                break
    except RequestError as error:
        return Verdict(str(error), error.param, error.code)
    except (RecursionError, MemoryError):
        return Verdict("the grammar cannot be used: it is too complex", "structured_output", "invalid_grammar")
    return Verdict()


def read(stream: BinaryIO, kind: type[T]) -> T | None:
    """The next message; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    return msgspec.msgpack.decode(data, type=kind) if len(data) == length else None


def write(stream: BinaryIO, message: msgspec.Struct) -> None:
    """Send a message."""
    data = msgspec.msgpack.encode(message)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def _limit_time() -> None:
    """End the process if it works for CPU_S seconds more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _limit_memory() -> None:
    """Let address space grow by MEMORY_BYTES from now on; what fails to get memory ends the process, or is a MemoryError."""
    try:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    except (OSError, ValueError):
        pass  # a system without /proc: the time limit has to do


if __name__ == "__main__":
    main()

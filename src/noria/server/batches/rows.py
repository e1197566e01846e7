"""What the rows of the database stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from noria.server.batches.objects import Batch, BatchUsage, InputDetails, RequestCounts

BATCH_COLUMNS = "seq, tenant, owner, life, record, status, total, completed, failed, input_tokens, cached_tokens, output_tokens"


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch: where it stands in the input file. `attempts` counts those that a crash ended."""

    number: int  # of the line in the file, from 1
    custom_id: str
    start: int
    length: int
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens of one line."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch with what only the server knows of it."""

    seq: int
    tenant: str
    owner: str  # the name of the key
    life: int  # seconds that its results are kept
    batch: Batch


def stored_batch(row: tuple[Any, ...]) -> StoredBatch:
    """A row of BATCH_COLUMNS."""
    seq, tenant, owner, life, record, status, total, completed, failed, prompt, cached, output = row
    batch = msgspec.json.decode(record, type=Batch)
    batch.status = status
    batch.request_counts = RequestCounts(total=total, completed=completed, failed=failed)
    batch.usage = BatchUsage(
        input_tokens=prompt,
        input_tokens_details=InputDetails(cached_tokens=cached),
        output_tokens=output,
        total_tokens=prompt + output,
    )
    return StoredBatch(seq, tenant, owner, life, batch)

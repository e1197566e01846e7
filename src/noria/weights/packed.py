"""From a checkpoint to the weights a backend receives, by way of a file of packed panels that the next start only maps.

    packed_file    what lies in such a file        packing_plan   which tensors go where
    packed_store   the folder of these files       packing        from the ones to the other

Where the cache cannot be written, weights are packed in memory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from noria.weights.checkpoint import Checkpoint
from noria.weights.formats import LinearWeight, PackedMatrix, VectorWeight, Weight
from noria.weights.packed_file import Bytes, Packed, Region, Unusable, read_header
from noria.weights.packed_store import Store, key_of
from noria.weights.packing import Progress, pack_in_memory
from noria.weights.packing_plan import Plan
from noria.weights.params import Param
from noria.weights.shared_files import remove_unused

log = logging.getLogger("noria.weights")


def load_parameters(
    checkpoint: Checkpoint,
    params: Sequence[Param],
    quantization: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Weight]:
    """The weights of `params` by name, mapped from the packed file, which is made first where there is none.

    `quantization` is None (as the checkpoint is, floats as bf16), "q8", "q4", "bf16" or "f32". Without `cache_dir`, or where
    it cannot be written, weights are packed in memory. `progress` is called while packing. The arrays are read-only.
    LoadError if a tensor is missing, has another shape, or is there and belongs to no parameter.
    """
    if cache_dir is not None:
        store = Store(cache_dir / "packed")
        try:
            return _loaded(store.load_or_pack(checkpoint, params, quantization, progress))
        except OSError as error:
            log.warning("%s: packed weights cannot be kept (%s); packing in memory", store.folder, error.strerror or error)
    plan = Plan(checkpoint, params, quantization)
    return _loaded(pack_in_memory(plan, progress))


def packed_key(
    checkpoint: Checkpoint, params: Sequence[Param], quantization: str | None = None, cache_dir: Path | None = None
) -> str:
    """What determines the packed weights, as 32 hex digits: equal keys are equal weights, on any machine."""
    content = Store(cache_dir / "packed").content(checkpoint) if cache_dir is not None else checkpoint.fingerprint
    return key_of(content, params, quantization)


def forget(cache_dir: Path, folder: Path) -> None:
    """Remove the packed files made of checkpoints in `folder`, except those that are in use."""
    for path in (cache_dir / "packed").glob("*.noria"):
        with contextlib.suppress(OSError, Unusable), path.open("rb") as file:
            if any(Path(f).is_relative_to(folder) for f in read_header(file).files):
                remove_unused(path)


def _loaded(packed: Packed) -> dict[str, Weight]:
    """Views of the packed bytes, as the backends take them."""
    for warning in packed.header.warnings:
        log.warning("%s", warning)

    def view(region: Region) -> Bytes:
        return packed.data[region.offset : region.offset + region.nbytes]

    weights: dict[str, Weight] = {}
    for entry in packed.header.entries:
        if entry.alias_of:
            weights[entry.name] = weights[entry.alias_of]
        elif entry.vector is not None:
            weights[entry.name] = VectorWeight(entry.name, view(entry.vector).view(np.float32))
        else:
            matrices = tuple(PackedMatrix(s.outputs, s.inputs, s.format, view(s.region)) for s in entry.segments)
            bias = None if entry.bias is None else view(entry.bias).view(np.float32)
            weights[entry.name] = LinearWeight(entry.name, matrices, bias)
    return weights

"""The load plan: which part of which file goes where, decided and checked from the files' headers only (pure)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from .config import ModelConfig
from .shard import WHOLE, Box, Leaf, Path, Shard, leaves, path_name

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Bytes per element of the dtypes that weights may be stored in.
STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
DTYPE_NAMES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class TensorInfo(NamedTuple):
    """What a safetensors header says of one tensor."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class Twin(NamedTuple):
    """Another tensor that must hold the same values: the stored head of a tied model."""

    file: str
    tensor: str


class Copy(NamedTuple):
    """Read box `source` of `tensor` in `file` into box `dest` of the leaf at `path`."""

    file: str
    tensor: str
    source: Box
    path: Path
    dest: Box
    nbytes: int
    twin: Twin | None = None


class LoadPlan(NamedTuple):
    """Copies that, with zero padding, fill each leaf exactly once; `dtype` is that of the stored checkpoint."""

    leaves: tuple[Leaf, ...]
    copies: tuple[Copy, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(copy.nbytes for copy in self.copies)


def make_plan(config: ModelConfig, found: Mapping[str, TensorInfo], shard: Shard = WHOLE) -> LoadPlan:
    """The load plan of one rank, for the tensors `found` in the files' headers.

    Raises ValueError that names the tensors that are missing, surplus, mis-shaped or of an unsupported dtype.
    """
    table = leaves(config, shard)
    source = {name: (name, info) for name, info in found.items()}
    if config.tie_word_embeddings and EMBED not in found and HEAD in found:
        source[EMBED] = source.pop(HEAD)  # a tied pair may be stored under either name
    _check_names(config, table, {name: info for name, (_, info) in source.items()})
    check_tiling(table)
    twin = Twin(source[HEAD][1].file, HEAD) if config.tie_word_embeddings and HEAD in source else None
    copies = []
    for leaf in table:
        for piece in leaf.pieces:
            stored, info = source[piece.tensor]
            if size := _volume(piece.source) * STORED[info.dtype]:
                equal = twin if piece.tensor == EMBED else None
                copies.append(Copy(info.file, stored, piece.source, leaf.path, piece.dest, size, equal))
    return LoadPlan(table, tuple(copies), config.dtype or DTYPE_NAMES[source[EMBED][1].dtype])


def chunks(copy: Copy, limit: int) -> Iterator[Copy]:
    """The copy in parts of at most `limit` bytes, cut between rows (a single row stays whole)."""
    start, stop = copy.source[0]
    rows = stop - start
    step = max(1, limit * rows // copy.nbytes)
    axis = len(copy.dest) - len(copy.source)  # stacked leaves have axes before those of the tensor
    offset = copy.dest[axis][0] - start
    for first in range(start, stop, step):
        last = min(first + step, stop)
        yield copy._replace(
            source=((first, last), *copy.source[1:]),
            dest=(*copy.dest[:axis], (first + offset, last + offset), *copy.dest[axis + 1 :]),
            nbytes=copy.nbytes // rows * (last - first),
        )


def _check_names(config: ModelConfig, table: tuple[Leaf, ...], found: Mapping[str, TensorInfo]) -> None:
    needed = {piece.tensor: piece.shape for leaf in table for piece in leaf.pieces}
    if missing := [name for name in needed if name not in found]:
        hint = ""
        if HEAD in missing:
            hint = "; if the head shares the embedding, config.json must say tie_word_embeddings=true"
        raise ValueError(f"the checkpoint lacks {_some(missing)}{hint}")
    extra = [name for name in found if name not in needed and not _ignored(name, config)]
    if extra:
        raise ValueError(
            f"the checkpoint has tensors that {config.architecture} with this config.json does not use: {_some(extra)}"
        )
    for name, shape in needed.items():
        info = found[name]
        if info.shape != shape:
            raise ValueError(
                f"{name} in {info.file} has shape {info.shape}, config.json asks for {shape}; "
                "one of the two belongs to another model"
            )
        if info.dtype not in STORED:
            raise ValueError(f"{name} in {info.file} is stored as {info.dtype}; supported: {', '.join(STORED)}")
    if config.tie_word_embeddings and HEAD in found and found[HEAD].shape != needed[EMBED]:
        raise ValueError(f"{HEAD} has shape {found[HEAD].shape}; tied to {EMBED} it needs {needed[EMBED]}")


def _ignored(name: str, config: ModelConfig) -> bool:
    # Old files carry the rotary frequencies, which follow from the config.
    return name.endswith(".rotary_emb.inv_freq") or (name == HEAD and config.tie_word_embeddings)


def _some(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def check_tiling(table: Iterable[Leaf]) -> None:
    """ValueError unless pieces and padding of each leaf cover it exactly once."""
    checked = set()  # layers are alike: each geometry is checked once
    for leaf in table:
        boxes = tuple(piece.dest for piece in leaf.pieces if _volume(piece.dest)) + leaf.padding
        if (leaf.shape, boxes) in checked:
            continue
        checked.add((leaf.shape, boxes))
        # Paint the boxes on the grid of all their edges: each cell must be painted once.
        edges = [sorted({0, size, *(e for box in boxes for e in box[i])}) for i, size in enumerate(leaf.shape)]
        cells = [{edge: number for number, edge in enumerate(axis)} for axis in edges]
        painted = np.zeros([len(axis) - 1 for axis in edges], np.int64)
        for box in boxes:
            painted[tuple(slice(cell[a], cell[b]) for cell, (a, b) in zip(cells, box, strict=True))] += 1
        inside = all(axis[0] == 0 and axis[-1] == size for axis, size in zip(edges, leaf.shape, strict=True))
        if not inside or not (painted == 1).all():
            raise ValueError(f"{path_name(leaf.path)}: its parts do not cover {leaf.shape} exactly once: {boxes}")


def parse_header(file: str, header: Any, data_bytes: int) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file from its parsed header; ValueError unless `data_bytes` is what they need."""
    found, end, wrong = {}, 0, []
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, stop = entry["data_offsets"]
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            if dtype in STORED and stop - begin != STORED[dtype] * math.prod(shape):
                wrong.append(f"{name} has {stop - begin} bytes, shape {shape} in {dtype} needs another number")
            found[name] = TensorInfo(file, dtype, shape)
            end = max(end, stop)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} has a broken header: {error!r}") from error
    if wrong:
        raise ValueError(f"{file}: {wrong[0]}")
    if data_bytes != end:
        raise ValueError(f"{file} holds {data_bytes} bytes of weights, its header names {end}: truncated or corrupt")
    return found

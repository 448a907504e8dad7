"""The load plan: which part of which file goes where, decided and checked from the files' headers alone (pure)."""

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

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


class Copy(NamedTuple):
    """Read box `source` of `tensor` in `file` into box `dest` of the leaf at `path`."""

    file: str
    tensor: str
    source: Box
    path: Path
    dest: Box
    nbytes: int


class LoadPlan(NamedTuple):
    """Copies that tile the leaves, with each leaf's zero padding; `same` are pairs that must hold equal bytes."""

    leaves: tuple[Leaf, ...]
    copies: tuple[Copy, ...]
    same: tuple[tuple[Copy, Copy], ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)


def make_plan(config: ModelConfig, found: Mapping[str, TensorInfo], shard: Shard = WHOLE) -> LoadPlan:
    """The plan for one rank; ValueError that names what is missing, surplus, mis-shaped or of a strange dtype."""
    table = leaves(config, shard)
    source = dict(found)
    if config.tie_word_embeddings and EMBED not in source and HEAD in source:
        source[EMBED] = source[HEAD]  # a tied pair may be stored under either name
    _check_names(config, table, source)
    copies = []
    for leaf in table:
        for piece in leaf.pieces:
            info = source[piece.tensor]
            size = _volume(piece.source) * STORED[info.dtype]
            if size:
                name = HEAD if info is found.get(HEAD) else piece.tensor
                copies.append(Copy(info.file, name, piece.source, leaf.path, piece.dest, size))
    check_tiling(table)
    same = ()
    if config.tie_word_embeddings and EMBED in found and HEAD in found:
        first = next((copy for copy in copies if copy.tensor == EMBED), None)
        if first is not None:
            info = found[HEAD]
            same = ((first, first._replace(file=info.file, tensor=HEAD)),)
    stored = DTYPE_NAMES[source[EMBED].dtype]
    return LoadPlan(table, tuple(copies), same, config.dtype or stored)


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
    size = 1
    for start, stop in box:
        size *= stop - start
    return size


def check_tiling(table: Iterable[Leaf]) -> None:
    """ValueError unless pieces and padding of each leaf cover it exactly once."""
    for leaf in table:
        boxes = [piece.dest for piece in leaf.pieces if _volume(piece.dest)] + list(leaf.padding)
        whole = tuple((0, size) for size in leaf.shape)
        if len(boxes) == 1 and boxes[0] == whole:
            continue
        # Boxes in sorted order either follow one another on the axis where they first differ, or overlap.
        covered = sum(_volume(box) for box in boxes)
        ordered = sorted(boxes)
        overlap = next(((a, b) for a, b in zip(ordered, ordered[1:], strict=False) if _overlap(a, b)), None)
        if covered != _volume(whole) or overlap or any(not _inside(box, leaf.shape) for box in boxes):
            raise ValueError(f"{path_name(leaf.path)}: its parts do not cover {leaf.shape} exactly once ({overlap})")


def _overlap(a: Box, b: Box) -> bool:
    return all(x[0] < y[1] and y[0] < x[1] for x, y in zip(a, b, strict=True))


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(0 <= s <= e <= n for (s, e), n in zip(box, shape, strict=True))


def parse_header(file: str, start: bytes, header: dict, size: int) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file from its parsed header; ValueError when the file is shorter than it says."""
    (length,) = struct.unpack("<Q", start)
    found, end = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, stop = entry["data_offsets"]
        found[name] = TensorInfo(file, entry["dtype"], tuple(entry["shape"]))
        expected = STORED.get(entry["dtype"])
        if expected and stop - begin != expected * _volume(tuple((0, n) for n in entry["shape"])):
            raise ValueError(f"{file}: the header gives {name} {stop - begin} bytes, its shape asks for another number")
        end = max(end, stop)
    if size != 8 + length + end:
        raise ValueError(f"{file} is {size} bytes long, its header asks for {8 + length + end}: truncated or corrupt")
    return found

"""How checkpoint tensors map to this rank's fused tensors: one pure table for loading, saving and checking.

Axis names as elsewhere: H hidden, N query heads, K KV heads, D head dim, I MLP width, V vocabulary, E experts.
"""

from collections.abc import Iterator
from typing import NamedTuple

from .config import ModelConfig

Box = tuple[tuple[int, int], ...]  # (start, stop) on each axis
Path = tuple[str | int, ...]  # keys and indices that lead to a leaf of the tree


class Shard(NamedTuple):
    """Rank `rank` of `size` tensor-parallel ranks."""

    rank: int = 0
    size: int = 1


WHOLE = Shard(0, 1)


class Span(NamedTuple):
    """A part [start, stop) of an axis, held in `rows` rows: the rest of them is zero padding."""

    start: int
    stop: int
    rows: int


class LocalSizes(NamedTuple):
    """The sizes of one rank's shard; counts include padding, spans give the real part of the whole axis."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab_start: int
    vocab_rows: int
    intermediate: int
    moe_intermediate: int
    q_span: Span
    kv_span: Span
    vocab_span: Span
    intermediate_span: Span
    moe_span: Span


class Piece(NamedTuple):
    """Box `source` of checkpoint tensor `tensor` (whole shape `shape`) is box `dest` of the leaf."""

    tensor: str
    shape: tuple[int, ...]
    source: Box
    dest: Box


class Leaf(NamedTuple):
    """One tensor of the tree: its pieces and its zero padding tile it exactly."""

    path: Path
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: tuple[Box, ...] = ()


def index_of(box: Box) -> tuple[slice, ...]:
    """What indexes a tensor by a box."""
    return tuple(slice(*bounds) for bounds in box)


def path_name(path: Path) -> str:
    """`("layers", 1, "qkv")` as `layers[1].qkv`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def split(count: int, shard: Shard) -> Span:
    """Equal contiguous parts of an axis, the last ones padded: ceil(count / size) rows on every rank."""
    rows = -(-count // shard.size)
    start = min(shard.rank * rows, count)
    return Span(start, min(start + rows, count), rows)


def split_heads(heads: int, kv_heads: int, shard: Shard) -> tuple[Span, Span]:
    """Query and KV heads of a rank; every query head lies with its KV head.

    Up to as many ranks as KV heads (or when the ranks are no multiple of them) KV heads are split and padded.
    Beyond, each KV head is repeated on size / kv_heads ranks, which share its query heads.
    """
    group = heads // kv_heads
    if shard.size <= kv_heads or shard.size % kv_heads:
        kv = split(kv_heads, shard)
        return Span(kv.start * group, kv.stop * group, kv.rows * group), kv
    copies = shard.size // kv_heads
    kv_head, part = divmod(shard.rank, copies)
    q = split(group, Shard(part, copies))
    return Span(kv_head * group + q.start, kv_head * group + q.stop, q.rows), Span(kv_head, kv_head + 1, 1)


def check_shard(config: ModelConfig, shard: Shard) -> None:
    """ValueError when the rank is out of range or there are more ranks than there is work."""
    if shard.size < 1 or not 0 <= shard.rank < shard.size:
        raise ValueError(f"rank={shard.rank} of size={shard.size} is no rank; need 0 <= rank < size")
    axes = {"num_attention_heads": config.num_attention_heads, "vocab_size": config.vocab_size}
    if not all(config.sparse_layers):
        axes["intermediate_size"] = config.intermediate_size
    if any(config.sparse_layers):
        axes["moe_intermediate_size"] = config.moe_intermediate_size
    for name, count in axes.items():
        if shard.size > count:
            raise ValueError(
                f"{name}={count} cannot be split over size={shard.size} ranks; use size {min(axes.values())} or less"
            )


def local_sizes(config: ModelConfig, shard: Shard = WHOLE) -> LocalSizes:
    """The sizes of one rank's shard; see `split` and `split_heads` for the rules.

    Raises ValueError when the rank is out of range or an axis is smaller than the number of ranks.
    """
    check_shard(config, shard)
    q, kv = split_heads(config.num_attention_heads, config.num_key_value_heads, shard)
    vocab = split(config.vocab_size, shard)
    mlp, moe = split(config.intermediate_size, shard), split(config.moe_intermediate_size, shard)
    return LocalSizes(
        heads=q.rows,
        kv_heads=kv.rows,
        head_dim=config.head_dim,
        vocab_start=shard.rank * vocab.rows,
        vocab_rows=vocab.rows,
        intermediate=mlp.rows,
        moe_intermediate=moe.rows,
        q_span=q,
        kv_span=kv,
        vocab_span=vocab,
        intermediate_span=mlp,
        moe_span=moe,
    )


def leaves(config: ModelConfig, shard: Shard = WHOLE) -> tuple[Leaf, ...]:
    """Every tensor of this rank's tree, in order; a tied lm_head is no leaf of its own."""
    sizes, H = local_sizes(config, shard), config.hidden_size
    found = [_rows(("embed",), [("model.embed_tokens.weight", config.vocab_size, sizes.vocab_span)], (H,))]
    for index in range(config.num_hidden_layers):
        found += _layer(config, sizes, index)
    found.append(_whole(("norm",), "model.norm.weight", (H,)))
    if not config.tie_word_embeddings:
        found.append(_rows(("lm_head",), [("lm_head.weight", config.vocab_size, sizes.vocab_span)], (H,)))
    return tuple(found)


def _layer(config: ModelConfig, sizes: LocalSizes, index: int) -> Iterator[Leaf]:
    H, D, path = config.hidden_size, config.head_dim, ("layers", index)
    base, attention = f"model.layers.{index}.", f"model.layers.{index}.self_attn."
    q, kv = _times(sizes.q_span, D), _times(sizes.kv_span, D)
    q_rows, kv_rows = config.num_attention_heads * D, config.num_key_value_heads * D
    projections = [("q_proj", q_rows, q), ("k_proj", kv_rows, kv), ("v_proj", kv_rows, kv)]
    yield _whole((*path, "input_norm"), base + "input_layernorm.weight", (H,))
    yield _rows((*path, "qkv"), [(f"{attention}{n}.weight", rows, span) for n, rows, span in projections], (H,))
    if config.qkv_bias:
        yield _rows((*path, "qkv_bias"), [(f"{attention}{n}.bias", rows, span) for n, rows, span in projections], ())
    if config.qk_norm:
        yield _whole((*path, "q_norm"), attention + "q_norm.weight", (D,))
        yield _whole((*path, "k_norm"), attention + "k_norm.weight", (D,))
    yield _columns((*path, "o"), attention + "o_proj.weight", H, q_rows, q)
    if config.o_bias:
        yield _whole((*path, "o_bias"), attention + "o_proj.bias", (H,))
    yield _whole((*path, "post_norm"), base + "post_attention_layernorm.weight", (H,))
    mlp = base + "mlp."
    if config.sparse_layers[index]:
        yield from _experts(config, sizes.moe_span, path, mlp)
        return
    width, span = config.intermediate_size, sizes.intermediate_span
    gate_up = [("gate_proj", width, span), ("up_proj", width, span)]
    yield _rows((*path, "gate_up"), [(f"{mlp}{n}.weight", rows, part) for n, rows, part in gate_up], (H,))
    if config.mlp_bias:
        yield _rows((*path, "gate_up_bias"), [(f"{mlp}{n}.bias", rows, part) for n, rows, part in gate_up], ())
    yield _columns((*path, "down"), mlp + "down_proj.weight", H, width, span)
    if config.mlp_bias:
        yield _whole((*path, "down_bias"), mlp + "down_proj.bias", (H,))


def _experts(config: ModelConfig, span: Span, path: Path, mlp: str) -> Iterator[Leaf]:
    H, E, width = config.hidden_size, config.num_experts, config.moe_intermediate_size
    yield _whole((*path, "router"), mlp + "gate.weight", (E, H))
    gate_up, down = [], []
    for e in range(E):
        name = f"{mlp}experts.{e}."
        gate_up.append(_rows((), [(f"{name}{n}.weight", width, span) for n in ("gate_proj", "up_proj")], (H,)))
        down.append(_columns((), name + "down_proj.weight", H, width, span))
    yield _stack((*path, "experts_gate_up"), gate_up)
    yield _stack((*path, "experts_down"), down)


def _whole(path: Path, tensor: str, shape: tuple[int, ...]) -> Leaf:
    box = tuple((0, size) for size in shape)
    return Leaf(path, shape, (Piece(tensor, shape, box, box),))


def _rows(path: Path, parts: list[tuple[str, int, Span]], rest: tuple[int, ...]) -> Leaf:
    """Parts of several tensors below one another, each followed by its padding."""
    pieces, padding, row = [], [], 0
    tail = tuple((0, size) for size in rest)
    for tensor, rows, span in parts:
        real = span.stop - span.start
        pieces.append(Piece(tensor, (rows, *rest), ((span.start, span.stop), *tail), ((row, row + real), *tail)))
        if real < span.rows:
            padding.append(((row + real, row + span.rows), *tail))
        row += span.rows
    return Leaf(path, (row, *rest), tuple(pieces), tuple(padding))


def _columns(path: Path, tensor: str, rows: int, columns: int, span: Span) -> Leaf:
    real = span.stop - span.start
    piece = Piece(tensor, (rows, columns), ((0, rows), (span.start, span.stop)), ((0, rows), (0, real)))
    padding = (((0, rows), (real, span.rows)),) if real < span.rows else ()
    return Leaf(path, (rows, span.rows), (piece,), padding)


def _stack(path: Path, parts: list[Leaf]) -> Leaf:
    pieces = [piece._replace(dest=((e, e + 1), *piece.dest)) for e, part in enumerate(parts) for piece in part.pieces]
    padding = [((e, e + 1), *box) for e, part in enumerate(parts) for box in part.padding]
    return Leaf(path, (len(parts), *parts[0].shape), tuple(pieces), tuple(padding))


def _times(span: Span, width: int) -> Span:
    return Span(span.start * width, span.stop * width, span.rows * width)

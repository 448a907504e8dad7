"""Log-probabilities of tokens under the raw logits: before penalties, temperature and filters.

The same functions serve generation and scoring, so their numbers agree. The normaliser is a sum of integers, which does
not depend on the order of summation: equal logits give equal bits for any batch and any number of ranks.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from fnllm.tensor_parallel import SINGLE, TensorParallel
from fnllm_kernels.order_keys import pack, packed_ids, packed_scores
from fnllm_kernels.threshold import MASS_ONE, masses


def masked_logits(logits: Float[Tensor, "T V"], vocab_start: int, vocab_limit: int) -> Float[Tensor, "T V"]:
    """Logits of this rank's slice in float32 (float64 stays), -inf from id `vocab_limit` on and where NaN is."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = torch.where(logits == logits, logits, -torch.inf)
    valid = valid_columns(logits.shape[-1], vocab_start, vocab_limit)
    if valid == logits.shape[-1]:
        return logits
    return torch.where(torch.arange(logits.shape[-1], device=logits.device) < valid, logits, -torch.inf)


def valid_columns(width: int, vocab_start: int, vocab_limit: int) -> int:
    """How many of a rank's `width` columns are ids below `vocab_limit`."""
    return min(max(vocab_limit - vocab_start, 0), width)


def log_normaliser(logits: Float[Tensor, "T V"], *, tp: TensorParallel = SINGLE) -> Float[Tensor, " T"]:
    """log(sum(exp(logits))) over all ranks' slices; its absolute error stays below 1e-6 for V up to 2**18.

    Differentiable with the usual softmax gradient, where the exchanges are.
    """
    detached = logits.detach()
    top = tp.all_reduce_max(detached.amax(-1))
    mass = masses(detached, top, torch.ones_like(top)).long().sum(-1)
    value = top + torch.log(tp.all_reduce(mass).double() / MASS_ONE).to(top.dtype)
    if (torch.is_grad_enabled() and logits.requires_grad) or unpack_dual(logits).tangent is not None:
        # The integers have no gradient: add a float form of the same function, minus its own value.
        smooth = torch.log(tp.all_reduce(torch.exp(logits - top[..., None]).sum(-1)))
        value = value + (smooth - smooth.detach())
    return value


def token_logprobs(
    logits: Float[Tensor, "T V"],
    ids: Int[Tensor, " T"],
    *,
    vocab_start: int = 0,
    vocab_limit: int,
    tp: TensorParallel = SINGLE,
) -> Float[Tensor, " T"]:
    """log softmax(logits)[ids] per row, over all ranks' slices; -inf for ids at or above `vocab_limit`.

    NaN if any logit of the row is NaN, even that of another id: the rest would give a number that looks right.
    """
    raw = masked_logits(logits, vocab_start, vocab_limit)
    values = logits_at(raw, ids, vocab_start=vocab_start, tp=tp) - log_normaliser(raw, tp=tp)
    broken = logits.detach()[:, : valid_columns(logits.shape[1], vocab_start, vocab_limit)].isnan().any(-1)
    # A factor, so that the gradient is NaN too.
    return values * torch.where(tp.all_reduce_max(broken.int()) > 0, torch.nan, 1.0).to(values.dtype)


def logits_at(
    logits: Float[Tensor, "T V"], ids: Int[Tensor, " T"], *, vocab_start: int = 0, tp: TensorParallel = SINGLE
) -> Float[Tensor, " T"]:
    """The logit of each row's id, from whichever rank holds it."""
    if tp.size == 1:
        return logits.gather(1, ids[:, None] - vocab_start).squeeze(1)
    local = ids - vocab_start
    here = (local >= 0) & (local < logits.shape[1])
    found = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    return tp.all_reduce_max(torch.where(here, found, -torch.inf))


def top_tokens(
    logits: Float[Tensor, "T V"], n: int, *, vocab_start: int = 0, tp: TensorParallel = SINGLE
) -> tuple[Int[Tensor, "T n"], Float[Tensor, "T n"]]:
    """Ids and logits of the `n` largest over all ranks' slices, falling; equal ones by rising id."""
    ids = vocab_start + torch.arange(logits.shape[1], device=logits.device)
    keys = torch.topk(pack(logits, ids[None, :]), min(n, logits.shape[1]), dim=-1).values
    if tp.size > 1:
        keys = tp.all_gather(keys, -1)
        keys = torch.topk(keys, min(n, keys.shape[-1]), dim=-1).values
    return packed_ids(keys), packed_scores(keys)
